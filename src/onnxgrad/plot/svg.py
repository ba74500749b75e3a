"""`to_svg`: the graph of a model as a picture, without Graphviz."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from html import escape
from itertools import pairwise

from onnxgrad.autodiff.partition import Partition
from onnxgrad.model.read import ModelLike
from onnxgrad.plot.layering import Layered
from onnxgrad.plot.placement import LINE, Box, Placed
from onnxgrad.plot.scene import ROOT, Cell, Item, Scene

_MANY = 200  # nodes: in larger models, modules are folded
_READABLE = 100  # boxes of such a picture at first
_GOLDEN = 137.508  # degrees: neighboring hues differ

STYLE = """
:root{--paper:#fff;--ink:#1c2430;--line:#8a94a3;--box:#f3f5f8;--edge:#b9c1cc}
@media (prefers-color-scheme:dark){
:root{--paper:#14181f;--ink:#e6eaf0;--line:#6f7b8c;--box:#222933;--edge:#465162}}
.graph{font:11px ui-sans-serif,system-ui,sans-serif;background:var(--paper)}
.graph text{fill:var(--ink)}
.graph .more{opacity:.75;font-size:10px}
.box rect{fill:var(--box);stroke:var(--edge)}
.box.input rect{stroke:#2f7de1;stroke-width:1.5}
.box.output rect{stroke:#1f9d55;stroke-width:1.5}
.box rect.serves{fill-opacity:.3;stroke-opacity:.9}
.box rect.bar{stroke:none;fill:#e0912f}
.box.saved>rect:first-child{stroke:#c2410c;stroke-width:2.5}
.box.recomputed>rect:first-child{stroke:#7c3aed;stroke-width:2;stroke-dasharray:5 3}
.frame>rect{fill:var(--ink);fill-opacity:.035;stroke:var(--edge)}
.frame.subgraph>rect{stroke-dasharray:3 3}
.folded>rect{fill:var(--box);stroke:var(--line)}
.arrow{fill:none;stroke:var(--line)}
.arrow.across{stroke-dasharray:4 3;opacity:.7}
.tip{fill:var(--line)}
"""


def to_svg(model: ModelLike | Partition, *, fold: bool | None = None) -> str:
    """Return the graph of `model` as SVG: nodes in boxes from above to below, in frames.

    Frames are modules, which exporters write into names or metadata of nodes, subgraphs and local
    functions. Boxes name an operator and its constants; an orange bar marks a node that reads
    weights. Boxes have tooltips with attributes, dtypes and shapes. The colors follow the color
    scheme of the reader, light or dark.

    In a gradient of `onnx_derivative(note_primal=True)`, the backward pass is on the right, goes
    up, and has the colors of the nodes that it differentiates. Nodes whose results it reads have a
    thick edge; for a `Partition`, these are the saved ones, and nodes that its backward model
    computes again have a dashed edge.

    Args:
        model: model, serialized model or path; or a `Partition`, of which the joint graph is drawn.
        fold: whether to draw each module as one box; None: in models of more than 200 nodes, where
            that leaves more than 100 boxes.

    Raises:
        ModelError: `model` cannot be read.

    Examples:
        >>> import onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]> f (float[N] x) => (float[N] y) {y = Exp(x)}
        ... ''')
        >>> svg = og.to_svg(model)
        >>> svg.startswith("<svg "), svg.count('class="box')
        (True, 3)
    """
    scene = Scene(model)
    return _Drawing(Layered(scene), folded_groups(scene, fold)).text()


def folded_groups(scene: Scene, fold: bool | None) -> set[int]:
    """Return the ids of the modules that are drawn as one box.

    For `fold=None`, in a large model, those are unfolded whose cells leave the picture readable,
    the outermost first.
    """
    modules = [g for g in scene.groups if g.kind in ("module", "backward")]
    if fold is not None:
        return {g.id for g in modules} if fold else set()
    if sum(item.kind == "node" for item in scene.items) <= _MANY:
        return set()
    cells = Counter([item.group for item in scene.items] + [g.parent for g in scene.groups])
    folded, visible = {g.id for g in modules}, cells[ROOT]
    for g in sorted(modules, key=lambda g: len(g.path)):
        if g.parent not in folded and visible + cells[g.id] <= _READABLE:
            folded.discard(g.id)
            visible += cells[g.id]
    return folded


def hues(scene: Scene) -> dict[int, int]:
    """Return the hue, in degrees, of each item that is differentiated or differentiates."""
    order = list(dict.fromkeys(i.primal for i in scene.items if i.primal))
    hue = {name: round(k * _GOLDEN) % 360 for k, name in enumerate(reversed(order))}
    names = {i.id: i.primal if "backward" in i.marks else i.first for i in scene.items}
    return {i: hue[name] for i, name in names.items() if name in hue}


class _Drawing:
    """The elements of the picture."""

    def __init__(self, layered: Layered, folded: Collection[int]) -> None:
        self.layered, self.scene = layered, layered.scene
        self.placed = Placed(layered, folded)
        self.folded = folded
        self.hues = hues(self.scene)

    def text(self) -> str:
        """Return the SVG."""
        width, height = round(self.placed.width), round(self.placed.height)
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="graph" width="{width}" '
            f'height="{height}" viewBox="0 0 {width} {height}">'
        )
        marker = (
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            'markerHeight="7" orient="auto"><path class="tip" d="M0 0 8 4 0 8z"/></marker></defs>'
        )
        style = f"<style>{STYLE}</style>"
        frames, boxes = self._frames_and_boxes(ROOT)
        return "\n".join([head, style, marker, *frames, *self._arrows(), *boxes, "</svg>\n"])

    def _frames_and_boxes(self, group: int) -> tuple[list[str], list[str]]:
        """Return the frames of the groups in a group, and the boxes of all items there."""
        frames, boxes = [], []
        cells = [c for row in self.layered.groups[group].rows for c in row if c[0] != "bend"]
        for kind, i in cells:
            box = self.placed.boxes[kind, i]
            if kind == "item":
                boxes.append(self._item(self.scene.items[i], box))
                continue
            frame = self.scene.groups[i]
            title = escape(frame.title)
            if i in self.folded:
                boxes.append(f'<g class="box folded">{_rect(box)}{_line(box, 20, title)}</g>')
                continue
            title = f'<text x="{box.x + 8:.1f}" y="{box.y + 15:.1f}">{title}</text>'
            frames.append(f'<g class="frame {frame.kind}">{_rect(box)}{title}</g>')
            inner = self._frames_and_boxes(i)
            frames += inner[0]
            boxes += inner[1]
        return frames, boxes

    def _item(self, item: Item, box: Box) -> str:
        names = " ".join(["box", item.kind, *sorted(item.marks - {"weight"})])
        style = ' rx="5"' if item.kind == "node" else ""
        if item.id in self.hues:
            color = f"hsl({self.hues[item.id]},65%,50%)"
            style += f' class="serves" style="fill:{color};stroke:{color}"'
        bar = Box(box.x + 3, box.y + 4, 3, box.height - 8)
        parts = [f'<g class="{names}">{_rect(box, style)}']
        if "weight" in item.marks:
            parts.append(_rect(bar, ' class="bar"'))
        parts.append(_line(box, 15, escape(item.title)))
        for k, line in enumerate(item.lines, 1):
            parts.append(_line(box, 15 + k * LINE, escape(line), ' class="more"'))
        return "".join([*parts, f"<title>{_lines(item.tip)}</title></g>"])

    def _arrows(self) -> list[str]:
        parts: dict[str, list[str]] = {}
        right = self.layered.groups[ROOT].right
        for arrow, way in zip(self.scene.arrows, self.layered.ways, strict=True):
            ends = [self._visible_cell(i) for i in (arrow.source, arrow.target)]
            if ends[0] == ends[1]:
                continue
            sides = {self.scene.outermost(i) in right for i in (arrow.source, arrow.target)}
            across = len(sides) > 1
            bends = [b for n in way if (b := self.placed.boxes.get(("bend", n)))]
            a, b = (self.placed.boxes[end] for end in ends)
            path = _across(a, b) if across else _curve(a, bends, b)
            name = f'class="arrow{" across" if across else ""}" d="{path}"'
            parts.setdefault(name, []).append(arrow.text)
        return [
            f'<path {name} marker-end="url(#tip)"><title>{_lines(texts)}</title></path>'
            for name, texts in parts.items()
        ]

    def _visible_cell(self, item: int) -> Cell:
        """Return the cell in which an item is drawn: the outermost folded group around it."""
        path = self.scene.path(item)
        return next((("group", g) for g in path[1:] if g in self.folded), ("item", item))


def _rect(box: Box, style: str = "") -> str:
    size = f'width="{box.width:.1f}" height="{box.height:.1f}"'
    return f'<rect x="{box.x:.1f}" y="{box.y:.1f}" {size}{style}/>'


def _lines(texts: list[str]) -> str:
    return escape("\n".join(dict.fromkeys(texts)))


def _line(box: Box, down: float, text: str, style: str = "") -> str:
    x, y = box.x + box.width / 2, box.y + down
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle"{style}>{text}</text>'


def _curve(a: Box, bends: list[Box], b: Box) -> str:
    """Return a path from the box `a` through `bends` to the box `b`, above or below it."""
    down = a.y < b.y
    bends = sorted(bends, key=lambda bend: bend.y, reverse=not down)
    points = [(a.x + a.width / 2, a.y + a.height if down else a.y)]
    points += [(p.x + p.width / 2, p.y) for p in bends]
    points.append((b.x + b.width / 2, b.y if down else b.y + b.height))
    path = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
    for (x, y), (u, v) in pairwise(points):
        middle = (y + v) / 2
        path += f"C{x:.1f} {middle:.1f} {u:.1f} {middle:.1f} {u:.1f} {v:.1f}"
    return path


def _across(a: Box, b: Box) -> str:
    """Return a path from the side of the box `a` to the facing side of the box `b`."""
    right = a.x < b.x
    x, y = a.x + a.width * right, a.y + a.height / 2
    u, v = b.x + b.width * (not right), b.y + b.height / 2
    middle = (x + u) / 2
    return f"M{x:.1f} {y:.1f}C{middle:.1f} {y:.1f} {middle:.1f} {v:.1f} {u:.1f} {v:.1f}"
