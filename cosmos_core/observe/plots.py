"""Plot the curves of `metrics.jsonl` with matplotlib: as PNG for Prefect's artifacts, as SVG for the report.

Each family of metrics has one panel with the step as x axis; `train/loss` and `validation/loss` share one. The names of
the metrics are read from the file, so the plots do not depend on the algorithm.
"""

from __future__ import annotations

import hashlib
import io
import math
import re
import threading
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from cosmos_core.observe.formatting import float_or_inf, get_metric_family

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DEFAULT_PANELS = ("loss", "reward", "accuracy", "kl", "grad_norm")
"""Families of metrics that are plotted by default, each in one panel: `loss` has `train/loss` and `validation/loss`."""
REPORT_PANELS = (*DEFAULT_PANELS, "reward/", "entropy", "length", "lr", "time/", "memory/")
"""Families of metrics in the report; `PREFIX/` stands for all metrics with this prefix that have no other panel."""
_PANEL_TITLES = {"reward/": "parts of the reward"}
_REWARD_STATISTICS = {f"reward/{name}" for name in ("std", "group_std", "invalid", "constant_groups")}

_TEXT_COLOR, _GRID_COLOR = "#6b7280", "#d4d4d8"
_LINE_COLORS = ("#4f6bed", "#e0802f", "#2f9e6e", "#b0569e")
MAX_CURVES = 2 * len(_LINE_COLORS)
"""Maximum number of lines in a panel; lines beyond the number of colours are dashed."""
_CSS_VARIABLES = {_TEXT_COLOR: "var(--ink-soft, #6b7280)", _GRID_COLOR: "var(--grid, #d4d4d8)"} | {
    colour: f"var(--line-{index}, {colour})" for index, colour in enumerate(_LINE_COLORS)
}
_MAX_PLOTTED_VALUE = 1e300  # larger absolute values are not plotted: matplotlib's margins would overflow
_PANEL_SIZE_INCHES = (3.5, 2.1)  # width and height of one panel in inches
_MATPLOTLIB_STYLE: Any = {
    "svg.fonttype": "none",  # write text instead of outlines: the file is smaller and has the font of the page
    "svg.hashsalt": "cosmos",  # fixed salt of the ids, so that equal curves give equal files
    "font.family": ["sans-serif"],
    "font.size": 8.0,
    "text.parse_math": False,
}
_plot_lock = threading.Lock()  # serialises plotting in several threads, because matplotlib's settings are global
SeriesByMetric = dict[str, tuple[list[float], list[float]]]


def plot_curves(metric_lines: Sequence[dict[str, Any]], panel_names: Sequence[str] = DEFAULT_PANELS) -> bytes:
    """Return a PNG with a panel for each of the `panel_names` whose metric occurs in the lines of `metrics.jsonl`, or
    with the text "no metrics yet". NaN, infinities and values beyond 1e300 leave a gap in the curve."""
    import matplotlib
    from matplotlib.figure import Figure

    panels = _collect_panels(metric_lines, panel_names)
    num_columns = max(1, min(3, len(panels)))
    num_rows = max(1, math.ceil(len(panels) / num_columns))
    with _plot_lock, matplotlib.rc_context(_MATPLOTLIB_STYLE):
        width, height = _PANEL_SIZE_INCHES
        figure = Figure(figsize=(width * num_columns, height * num_rows), layout="constrained")
        if not panels:
            figure.text(0.5, 0.5, "no metrics yet", ha="center", va="center", color=_TEXT_COLOR)
        for panel_index, (name, series) in enumerate(panels.items()):
            _draw_series(figure.add_subplot(num_rows, num_columns, panel_index + 1), name, series)
        png_buffer = io.BytesIO()
        figure.savefig(png_buffer, format="png", dpi=130)
    return png_buffer.getvalue()


def draw_curves_svg(metric_lines: Sequence[dict[str, Any]], panel_names: Sequence[str] = DEFAULT_PANELS) -> str:
    """Return one `<svg>` element, for an HTML page, for each of the `panel_names` whose metric occurs in the lines of
    `metrics.jsonl`. Colours are the CSS variables `--ink-soft`, `--grid`, `--line-0` to `--line-3`, so that they follow
    the dark mode of the page."""
    return _draw_svg_panels(_collect_panels(metric_lines, panel_names))


def overlay_runs(
    lines_by_run: Mapping[str, Sequence[dict[str, Any]]], panel_names: Sequence[str] = DEFAULT_PANELS
) -> str:
    """Return one `<svg>` element for each of the `panel_names`, with a curve for each run; `lines_by_run` has the
    parsed lines of `metrics.jsonl` by the name of the run."""
    series_by_metric: dict[str, SeriesByMetric] = {}
    for run_name, lines in lines_by_run.items():
        for panel in _collect_panels(lines, panel_names).values():
            for key, curve_points in panel.items():
                series_by_metric.setdefault(key, {})[run_name] = curve_points
    return _draw_svg_panels(series_by_metric)


def _draw_svg_panels(panels: Mapping[str, SeriesByMetric]) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    svg_panels = []
    with _plot_lock, matplotlib.rc_context(_MATPLOTLIB_STYLE):
        for name, series in panels.items():
            figure = Figure(figsize=_PANEL_SIZE_INCHES, layout="constrained")
            _draw_series(figure.add_subplot(), name, series)
            svg_panels.append(_figure_to_svg(figure, f"{_get_panel_title(name)} by step"))
    return "\n".join(svg_panels)


def _collect_panels(metric_lines: Sequence[dict[str, Any]], panel_names: Sequence[str]) -> dict[str, SeriesByMetric]:
    panels: dict[str, SeriesByMetric] = {key: {} for key in panel_names}
    for line in metric_lines:
        step = line.get("step")
        if not isinstance(step, int | float) or math.isnan(_to_plot_value(step)):
            continue
        for key, value in line.items():
            metric_prefix, separator, _ = key.partition("/")
            panel_name = name if (name := get_metric_family(key)) in panels else metric_prefix + separator
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if panel_name in panels and key not in _REWARD_STATISTICS and is_number:
                plotted_steps, plotted_values = panels[panel_name].setdefault(key, ([], []))
                plotted_steps.append(float(step))
                plotted_values.append(_to_plot_value(value))
    for series in panels.values():
        for key in [key for key, (_, plotted_values) in series.items() if not any(map(math.isfinite, plotted_values))]:
            del series[key]
    return {name: series for name, series in panels.items() if len(series) > (name in _PANEL_TITLES)}


def _get_panel_title(name: str) -> str:
    return _PANEL_TITLES.get(name, name.removesuffix("/"))


def _to_plot_value(metric_value: float) -> float:
    """Return a metric as a value to plot; NaN, which leaves a gap in the curve, if an axis cannot show the value."""
    plot_value = float_or_inf(metric_value)
    return plot_value if abs(plot_value) <= _MAX_PLOTTED_VALUE else math.nan


def _draw_series(axes: Axes, name: str, series: SeriesByMetric) -> None:
    from matplotlib.ticker import MaxNLocator

    plotted_series = dict(list(series.items())[:MAX_CURVES])
    for i, (key, (steps, values)) in enumerate(plotted_series.items()):
        colour, line_style = _LINE_COLORS[i % len(_LINE_COLORS)], "-" if i < len(_LINE_COLORS) else "--"
        marker = "o" if len(steps) <= 12 else ""
        axes.plot(steps, values, line_style, color=colour, linewidth=1.4, marker=marker, markersize=2.8, label=key)
    curve_points = [point for line in plotted_series.values() for point in zip(*line, strict=True)]
    plotted_steps = {step for step, value in curve_points if math.isfinite(value)}
    if len(plotted_steps) == 1:
        axes.set_xlim(min(plotted_steps) - 1, max(plotted_steps) + 1)
    axes.set_title(_get_panel_title(name), loc="left", fontsize=9, color=_TEXT_COLOR)
    axes.tick_params(colors=_TEXT_COLOR, labelsize=7, length=0)
    axes.grid(axis="y", color=_GRID_COLOR, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4))
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_GRID_COLOR)
    if len(plotted_series) > 1:
        axes.legend(frameon=False, fontsize=7, labelcolor=_TEXT_COLOR, handlelength=1.2)


def _figure_to_svg(figure: Figure, aria_label: str) -> str:
    svg_buffer = io.StringIO()
    empty_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(svg_buffer, format="svg", transparent=True, metadata=empty_metadata)
    svg = svg_buffer.getvalue()
    svg_content = svg[svg.index(">", svg.index("<svg")) + 1 : svg.rindex("</svg>")]
    # Remove style sheets and rename ids, because those of an embedded SVG apply to the whole HTML page.
    svg_content = re.sub(r"<(style|metadata)\b.*?</\1>", "", svg_content, flags=re.DOTALL)
    svg_content = re.sub(r'<g id="[^"]*"/>', "", svg_content)
    svg_content = re.sub(r'<g id="[^"]*">', "<g>", svg_content)
    svg_content = re.sub(r" font-family: [^;\"]*;", "", svg_content)
    svg_digest = hashlib.sha256(svg_content.encode()).hexdigest()[:8]
    svg_content = re.sub(r'(id="|href="#|url\(#)([mp][0-9a-f]+)', rf"\g<1>c{svg_digest}-\2", svg_content)
    svg_content = re.sub(r"\s*\n\s*", " ", svg_content).replace("xlink:href", "href")
    for colour, css_variable in _CSS_VARIABLES.items():
        svg_content = svg_content.replace(colour, css_variable)
    view_box = "0 0 {:g} {:g}".format(*(72 * inches for inches in _PANEL_SIZE_INCHES))
    aria_label = escape(aria_label)
    return f'<svg class="curve" role="img" aria-label="{aria_label}" viewBox="{view_box}">{svg_content}</svg>'
