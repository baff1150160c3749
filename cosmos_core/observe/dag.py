"""Compute the layout of the stage graph for `graph.svg`: boxes in columns by depth, and the edges between them.

The layout is made for small graphs: layers from left to right (Sugiyama's method, with one sweep that sorts each layer
by the mean vertical position of the predecessors). An edge across several columns gets an empty slot in each of them,
so that no edge crosses a box.
"""

from dataclasses import dataclass, field

from cosmos_core.observe.record import RunRecord, StageRecord

_BOX_WIDTH, _BOX_HEIGHT = 138, 62
_HORIZONTAL_GAP, _VERTICAL_GAP = 34, 16
_EDGE_SLOT_HEIGHT = 10
_PAGE_MARGIN = 4


@dataclass(frozen=True)
class StageGraphLayout:
    """Layout of the graph of a run's stages; all lengths are in pixels."""

    width: float
    height: float
    boxes: list[tuple[float, float, StageRecord]]
    """Position of the left edge, position of the top edge, and stage of each box."""
    edges: list[tuple[str, bool]]
    """SVG path of each segment of an edge, and whether the segment ends at the box of a stage."""
    box_width: int = _BOX_WIDTH
    box_height: int = _BOX_HEIGHT


@dataclass
class _LayoutNode:
    """Node of the layout: a stage or, if `stage` is None, the slot through which an edge crosses a column."""

    column: int
    stage: StageRecord | None
    predecessors: list["_LayoutNode"] = field(default_factory=list)
    y: float = 0.0

    @property
    def height(self) -> int:
        return _BOX_HEIGHT if self.stage else _EDGE_SLOT_HEIGHT

    @property
    def left_edge(self) -> float:
        return _PAGE_MARGIN + self.column * (_BOX_WIDTH + _HORIZONTAL_GAP)


def compute_layout(run: RunRecord) -> StageGraphLayout | None:
    """Return the positions of the boxes and edges of the graph of a run's stages; None if the run has no stages."""
    nodes = _build_layout_nodes(run.stages)
    if not nodes:
        return None
    nodes_by_column: list[list[_LayoutNode]] = [[] for _ in range(1 + max(node.column for node in nodes))]
    for node in nodes:
        nodes_by_column[node.column].append(node)
    height = max(sum(node.height + _VERTICAL_GAP for node in column) - _VERTICAL_GAP for column in nodes_by_column)
    for column in nodes_by_column:
        _arrange_column(column, height)
    return StageGraphLayout(
        width=2 * _PAGE_MARGIN + len(nodes_by_column) * (_BOX_WIDTH + _HORIZONTAL_GAP) - _HORIZONTAL_GAP,
        height=height + 2 * _PAGE_MARGIN,
        boxes=[(node.left_edge, node.y, node.stage) for node in nodes if node.stage],
        edges=[(_draw_edge(other, node), node.stage is not None) for node in nodes for other in node.predecessors],
    )


def _build_layout_nodes(stages: tuple[StageRecord, ...]) -> list[_LayoutNode]:
    nodes_by_name = {stage.name: _LayoutNode(stage.depth, stage) for stage in stages}
    crossing_nodes: list[_LayoutNode] = []
    for stage in stages:
        for source_node in (nodes_by_name[name] for name in stage.after if name in nodes_by_name):
            for column in range(source_node.column + 1, stage.depth):
                source_node = _LayoutNode(column, None, [source_node])
                crossing_nodes.append(source_node)
            nodes_by_name[stage.name].predecessors.append(source_node)
    return [*nodes_by_name.values(), *crossing_nodes]


def _arrange_column(column: list[_LayoutNode], total_height: float) -> None:
    """Sort the nodes of a column by the mean vertical position of their predecessors, and centre the column
    vertically."""

    def get_preferred_center(node: _LayoutNode) -> float:
        predecessor_centers = [predecessor.y + predecessor.height / 2 for predecessor in node.predecessors]
        return sum(predecessor_centers) / len(predecessor_centers) if predecessor_centers else total_height / 2

    column.sort(key=get_preferred_center)
    y = _PAGE_MARGIN + (total_height - sum(node.height + _VERTICAL_GAP for node in column) + _VERTICAL_GAP) / 2
    for node in column:
        node.y = y
        y += node.height + _VERTICAL_GAP


def _draw_edge(source_node: _LayoutNode, target_node: _LayoutNode) -> str:
    x1, y1 = source_node.left_edge + _BOX_WIDTH, source_node.y + source_node.height / 2
    x2, y2 = target_node.left_edge, target_node.y + target_node.height / 2
    svg_path_start = f"M{source_node.left_edge:g} {y1:g} H{x1:g}" if source_node.stage is None else f"M{x1:g} {y1:g}"
    middle_x = (x1 + x2) / 2
    return f"{svg_path_start} C{middle_x:g} {y1:g} {middle_x:g} {y2:g} {x2:g} {y2:g}"
