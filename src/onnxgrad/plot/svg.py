"""`to_svg`: the graph of a model as a picture, without Graphviz."""

from __future__ import annotations

from html import escape

from onnxgrad.autodiff.partition import Partition
from onnxgrad.model.read import ModelLike
from onnxgrad.plot.placement import LINE, TITLE, Box, Curve, lay_out_model
from onnxgrad.plot.scene import Group, Item

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
MARKER = (
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
    'markerHeight="7" orient="auto"><path class="tip" d="M0 0 8 4 0 8z"/></marker></defs>'
)


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
    placed = lay_out_model(model, fold)
    scene, hues = placed.scene, placed.scene.gradient_hues()
    frames, boxes = [], []
    for (kind, i), box in placed.drawn_cells():
        if kind == "item":
            item = scene.items[i]
            tooltip = f"<title>{_distinct_lines(item.details)}</title>"
            boxes.append(item_element(item, box, hues.get(i), tooltip))
        elif i in placed.folded:
            boxes.append(folded_group_element(scene.groups[i], box))
        else:
            frames.append(_frame_element(scene.groups[i], box))
    arrows = map(_arrow_element, placed.curves())
    width, height = round(placed.width), round(placed.height)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="graph" width="{width}" '
        f'height="{height}" viewBox="0 0 {width} {height}">'
    )
    style = f"<style>{STYLE}</style>"
    return "\n".join([head, style, MARKER, *frames, *arrows, *boxes, "</svg>\n"])


def item_element(item: Item, box: Box, hue: int | None, tooltip: str = "") -> str:
    """Return the SVG element of a node, an input or an output, with `tooltip` inside."""
    names = " ".join(["box", item.kind, *sorted(item.marks - {"weight"})])
    style = ' rx="5"' if item.kind == "node" else ""
    if hue is not None:
        color = f"hsl({hue},65%,50%)"
        style += f' class="serves" style="fill:{color};stroke:{color}"'
    bar = Box(box.x + 3, box.y + 4, 3, box.height - 8)
    texts = [_rectangle_element(box, style)]
    if "weight" in item.marks:
        texts.append(_rectangle_element(bar, ' class="bar"'))
    texts.append(_centered_text(box, TITLE, item.title))
    for k, line in enumerate(item.lines, 1):
        texts.append(_centered_text(box, TITLE + k * LINE, line, ' class="more"'))
    return f'<g class="{names}">{"".join(texts)}{tooltip}</g>'


def folded_group_element(group: Group, box: Box) -> str:
    """Return the SVG element of the box of a folded group."""
    title = _centered_text(box, 20, group.folded_title)
    return f'<g class="box folded">{_rectangle_element(box)}{title}</g>'


def _frame_element(group: Group, box: Box) -> str:
    title = f'<text x="{box.x + 8:.1f}" y="{box.y + TITLE:.1f}">{escape(group.title)}</text>'
    return f'<g class="frame {group.kind}">{_rectangle_element(box)}{title}</g>'


def _arrow_element(curve: Curve) -> str:
    (x, y), *points = curve.points
    path = f"M{x:.1f} {y:.1f}"
    for n in range(0, len(points), 3):
        path += "C" + " ".join(f"{u:.1f} {v:.1f}" for u, v in points[n : n + 3])
    names = "arrow across" if curve.across else "arrow"
    tooltip = f"<title>{_distinct_lines(curve.texts)}</title>"
    return f'<path class="{names}" d="{path}" marker-end="url(#tip)">{tooltip}</path>'


def _rectangle_element(box: Box, style: str = "") -> str:
    size = f'width="{box.width:.1f}" height="{box.height:.1f}"'
    return f'<rect x="{box.x:.1f}" y="{box.y:.1f}" {size}{style}/>'


def _distinct_lines(texts: list[str]) -> str:
    return escape("\n".join(dict.fromkeys(texts)))


def _centered_text(box: Box, down: float, text: str, style: str = "") -> str:
    x, y = box.x + box.width / 2, box.y + down
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle"{style}>{escape(text)}</text>'
