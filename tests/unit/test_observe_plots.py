"""Curves from metrics: what is drawn, read back from the svg; the png opened by Pillow."""

from __future__ import annotations

import io
import math
import re
import xml.etree.ElementTree as ET
from typing import Any

import pytest
from PIL import Image

from cosmos_core.observe.plots import REPORT_PANELS, draw_curves_svg, plot_curves

LINES: list[dict[str, Any]] = [
    {"step": i, "time": 1.0, "loss": float(30 - i), "reward/mean": float(i), "reward/std": 1.0, "time/step": 2.0}
    for i in range(21)
]


def pictures(svg: str) -> list[ET.Element]:
    return list(ET.fromstring(f"<page>{svg}</page>"))


def paths(picture: ET.Element, colour: str = "--line-0") -> list[list[tuple[float, float]]]:
    """Points of the pieces of a curve."""
    found = [path for path in picture.iter("path") if colour in path.get("style", "")]
    drawn = [path.attrib["d"] for path in found if "fill: none" in path.attrib["style"]]
    pieces = [piece for d in drawn for piece in d.split("M") if piece.strip()]
    return [[(float(x), float(y)) for x, y in re.findall(r"([-\d.]+) ([-\d.]+)", piece)] for piece in pieces]


def test_there_is_one_panel_a_family_that_has_values() -> None:
    found = pictures(draw_curves_svg(LINES))
    assert [picture.get("aria-label") for picture in found] == ["loss by step", "reward by step"]
    assert not any(map(draw_curves_svg, ([], [{"step": 1, "loss": math.nan}]))) and draw_curves_svg(LINES, ["kl"]) == ""


def test_a_straight_line_of_values_is_drawn_straight_and_falls_where_the_loss_falls() -> None:
    loss, reward = (paths(picture)[0] for picture in pictures(draw_curves_svg(LINES)))
    for points, sign in ((loss, 1), (reward, -1)):  # y grows downwards in svg
        (x0, y0), (x1, y1) = points[0], points[-1]
        assert x1 > x0 and sign * (y1 - y0) > 0
        for x, y in points:
            assert abs((y - y0) / (y1 - y0) - (x - x0) / (x1 - x0)) < 1e-3


def test_nan_leaves_a_gap() -> None:
    lines = [{**line, "loss": math.nan if line["step"] == 10 else line["loss"] + line["step"] % 2} for line in LINES]
    pieces = paths(pictures(draw_curves_svg(lines, ["loss"]))[0])
    assert [len(piece) for piece in pieces] == [10, 10]


@pytest.mark.parametrize("values", [pytest.param((1e308, -1e308, 1.0), marks=pytest.mark.full), (10**400, 2.0, 1e301)])
def test_what_no_axis_reaches_leaves_a_gap(values: tuple[float, ...]) -> None:
    lines = [{"step": step, "train/loss": value} for step, value in enumerate(values)]
    drawn = [line if abs(line["train/loss"]) < 1e300 else line | {"train/loss": math.nan} for line in lines]
    assert draw_curves_svg(lines) == draw_curves_svg(drawn) != ""
    assert plot_curves(lines) == plot_curves(drawn)
    assert draw_curves_svg([{"step": 10**400, "train/loss": 1.0}]) == ""


def test_the_curves_of_a_family_share_a_panel_and_have_a_legend() -> None:
    lines = [*LINES, *({"step": i, "validation/reward": i / 2} for i in (0, 10, 20))]
    picture = pictures(draw_curves_svg(lines, ["reward"]))[0]
    assert len(paths(picture, "--line-0")) >= 1 and len(paths(picture, "--line-1")) >= 1
    texts = [element.text for element in picture.iter("text")]
    assert "reward/mean" in texts and "validation/reward" in texts and "reward/std" not in texts


def test_a_name_with_markup_or_dollars_is_drawn_as_it_is() -> None:
    lines = [{"step": i, "a$b<i>$/loss": float(i), "loss": 1.0} for i in range(3)]
    texts = [element.text for element in pictures(draw_curves_svg(lines))[0].iter("text")]
    assert "a$b<i>$/loss" in texts


def test_the_svg_brings_no_style_sheet_no_address_and_no_id_twice() -> None:
    svg = draw_curves_svg([*LINES, *({"step": i, "validation/loss": i / 2} for i in (0, 10, 20))])
    assert "<style" not in svg and "http" not in svg
    ids = re.findall(r'id="([^"]+)"', svg)
    named = re.findall(r"(?:url\(|href=.)#([\w-]+)", svg)
    assert len(ids) == len(set(ids)) and all(f'id="{name}"' in svg for name in named)
    assert svg == draw_curves_svg([*LINES, *({"step": i, "validation/loss": i / 2} for i in (0, 10, 20))])


def test_the_png_is_a_picture_with_something_on_it_also_for_one_point_and_for_none() -> None:
    for lines in (LINES, [{"step": 3, "loss": 1.0}], []):
        image = Image.open(io.BytesIO(plot_curves(lines))).convert("L")
        assert image.width >= 400 and image.getextrema() != (255, 255)


def test_the_parts_of_a_reward_share_a_panel_and_one_part_has_none() -> None:
    parts = {"reward/format": 0.5, "reward/near": 0.25, "reward/std": 9.0, "reward/invalid": 9.0}
    lines = [{"step": i, "time": 1.8e9, "reward/mean": 0.75, "time/step": 2.0, **parts} for i in range(3)]
    svg = draw_curves_svg(lines, REPORT_PANELS)
    labels = [picture.get("aria-label") for picture in pictures(svg)]
    assert labels == ["reward by step", "parts of the reward by step", "time by step"]
    assert "reward/near" in svg and "reward/std" not in svg and "reward/invalid" not in svg
    assert "1e9" not in svg, "the time panel has durations, not the clock"
    alone = [{"step": i, "reward/mean": 0.75, "reward/near": 0.75} for i in range(3)]
    assert [each.get("aria-label") for each in pictures(draw_curves_svg(alone, REPORT_PANELS))] == ["reward by step"]
