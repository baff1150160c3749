"""The graph of stages as one inline SVG: columns by depth, boxes coloured by state, arrows between them.

Small graphs only: layers from left to right (Sugiyama's scheme with one sweep by the mean height of what comes
before). An edge that jumps over columns gets an empty slot in each, so that no arrow runs through a box.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape

from cosmos_core.observe import wording
from cosmos_core.observe.record import RunRecord, StageRecord

_BOX_WIDTH, _BOX_HEIGHT = 138, 62
_GAP_X, _GAP_Y = 34, 16
_LANE_HEIGHT = 10
_MARGIN = 4


@dataclass
class _Node:
    """A stage, or a lane that a long edge takes through a column (`stage` is None)."""

    column: int
    stage: StageRecord | None
    before: list[_Node] = field(default_factory=list)
    y: float = 0.0

    @property
    def height(self) -> int:
        return _BOX_HEIGHT if self.stage else _LANE_HEIGHT

    @property
    def left(self) -> float:
        return _MARGIN + self.column * (_BOX_WIDTH + _GAP_X)


def draw(run: RunRecord) -> str:
    """The graph as an `<svg>` for an html page; empty for a run without stages."""
    nodes = _nodes(run.stages)
    if not nodes:
        return ""
    columns: list[list[_Node]] = [[] for _ in range(1 + max(node.column for node in nodes))]
    for node in nodes:
        columns[node.column].append(node)
    height = max(sum(node.height + _GAP_Y for node in column) - _GAP_Y for column in columns)
    for column in columns:
        _place(column, height)
    edges = [_edge(other, node) for node in nodes for other in node.before]
    boxes = [_box(node, node.stage) for node in nodes if node.stage]
    width = 2 * _MARGIN + len(columns) * (_BOX_WIDTH + _GAP_X) - _GAP_X
    return (
        f'<svg class="dag" role="img" aria-label="stages of the pipeline" viewBox="0 0 {width} {height + 2 * _MARGIN}" '
        f'style="max-width: {1.15 * width:.0f}px; min-width: {0.72 * width:.0f}px">'
        '<defs><marker id="dag-arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto"><path d="M0 0.5 L8 4 L0 7.5 z"/></marker></defs>'
        f"{''.join(edges)}{''.join(boxes)}</svg>"
    )


def label(stage: StageRecord) -> str:
    """The state as people read it; the report that is being written cannot know its own end."""
    return "this page" if stage.kind.makes == "page" and stage.status == "running" else stage.status


def _nodes(stages: tuple[StageRecord, ...]) -> list[_Node]:
    by_name = {stage.name: _Node(stage.depth, stage) for stage in stages}
    lanes: list[_Node] = []
    for stage in stages:
        for name in stage.after:
            if name not in by_name:
                continue
            reached = by_name[name]
            for column in range(reached.column + 1, stage.depth):
                lane = _Node(column, None, [reached])
                lanes.append(lane)
                reached = lane
            by_name[stage.name].before.append(reached)
    return [*by_name.values(), *lanes]


def _place(column: list[_Node], height: float) -> None:
    """Order a column by the mean height of what comes before, and centre it."""

    def wish(node: _Node) -> float:
        middles = [other.y + other.height / 2 for other in node.before]
        return sum(middles) / len(middles) if middles else height / 2

    column.sort(key=wish)
    y = _MARGIN + (height - sum(node.height + _GAP_Y for node in column) + _GAP_Y) / 2
    for node in column:
        node.y = y
        y += node.height + _GAP_Y


def _edge(source: _Node, target: _Node) -> str:
    x1, y1 = source.left + _BOX_WIDTH, source.y + source.height / 2
    x2, y2 = target.left, target.y + target.height / 2
    start = f"M{source.left:g} {y1:g} H{x1:g}" if source.stage is None else f"M{x1:g} {y1:g}"
    bend = (x1 + x2) / 2
    arrow = ' marker-end="url(#dag-arrow)"' if target.stage else ""
    return f'<path class="edge" d="{start} C{bend:g} {y1:g} {bend:g} {y2:g} {x2:g} {y2:g}"{arrow}/>'


def _box(node: _Node, stage: StageRecord) -> str:
    x, y, seconds = node.left, node.y, stage.seconds
    time = wording.duration(seconds) if seconds is not None and label(stage) == stage.status else ""
    name = stage.name if len(stage.name) <= 17 else f"{stage.name[:16]}…"
    hint = f"{stage.name} ({stage.kind.name}): {stage.status}"
    return (
        f'<g class="box state-{escape(stage.status)}"><title>{escape(hint)}</title>'
        f'<rect x="{x:g}" y="{y:g}" width="{_BOX_WIDTH}" height="{_BOX_HEIGHT}" rx="8"/>'
        f'<rect class="edge-mark" x="{x:g}" y="{y + 8:g}" width="3.5" height="{_BOX_HEIGHT - 16}" rx="1.75"/>'
        f'<text class="name" x="{x + 13:g}" y="{y + 20:g}">{escape(name)}</text>'
        f'<text class="kind" x="{x + 13:g}" y="{y + 35:g}">{escape(stage.kind.name)}</text>'
        f'<text class="state" x="{x + 13:g}" y="{y + 52:g}">{escape(label(stage))}</text>'
        f'<text class="time" x="{x + _BOX_WIDTH - 10:g}" y="{y + 52:g}">{escape(time)}</text></g>'
    )
