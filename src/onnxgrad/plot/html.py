"""`to_html`: the graph of a model as an interactive page; `show_picture`: in a notebook."""

from __future__ import annotations

import json
from html import escape
from importlib.resources import files
from typing import Any

from onnxgrad.autodiff.partition import Partition
from onnxgrad.model.read import ModelLike
from onnxgrad.plot import placement
from onnxgrad.plot.layering import LayeredScene
from onnxgrad.plot.placement import Box
from onnxgrad.plot.scene import Cell, Scene
from onnxgrad.plot.svg import MARKER, STYLE, folded_group_element, item_element

_HEIGHT = 560  # pixels in a notebook


def to_html(model: ModelLike | Partition, *, fold: bool | None = None, title: str = "") -> str:
    """Return the graph of `model` as an interactive page, in one file without requests.

    The picture is the one that `to_svg` draws. It can be moved, zoomed and searched; modules,
    subgraphs and local functions fold by a click on their titles; a box tells its attributes,
    dtypes, shapes and the elements of small constants. It is usable with 2,000 nodes and more.

    Args:
        model: model, serialized model or path; or a `Partition`, of which the joint graph is drawn.
        fold: whether each module is one box at first; None: as in `to_svg`.
        title: of the page.

    Raises:
        ModelError: `model` cannot be read.

    Examples:
        >>> import onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]> f (float[N] x) => (float[N] y) {y = Exp(x)}
        ... ''')
        >>> page = og.to_html(model, title="exponential")
        >>> "<title>exponential</title>" in page, "http:" in page.replace("http://www.w3.org", "")
        (True, False)
    """
    return _html_page_text(Scene(model), fold, title)


def _html_page_text(scene: Scene, fold: bool | None, title: str = "") -> str:
    """Return the text of the page: `view.html` with its style, title and data filled in."""
    data = _page_data(LayeredScene(scene), scene.folded_groups(fold))
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    page = (files("onnxgrad") / "plot" / "view.html").read_text("utf-8")
    head, _, rest = page.partition("TITLE")
    before, _, after = rest.replace("MARKER", MARKER).partition("DATA")
    return f"{head}{escape(title or 'ONNX graph')}{before.replace('STYLE', STYLE)}{text}{after}"


class Picture:
    """The interactive graph of a model, for notebooks; `show_picture` returns it.

    Attributes:
        html: the page.

    Examples:
        >>> import onnx, onnxgrad as og
        >>> picture = og.plot.show_picture(onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]> f (float[N] x) => (float[N] y) {y = Exp(x)}
        ... '''))
        >>> picture
        <Picture of 3 items: the value of a notebook's cell, or the page `html`>
    """

    def __init__(self, html: str, items: int) -> None:
        self.html, self._items = html, items

    def __repr__(self) -> str:
        return (
            f"<Picture of {self._items} items: the value of a notebook's cell, or the page `html`>"
        )

    def _repr_html_(self) -> str:
        style = f"width:100%;height:{_HEIGHT}px;border:1px solid #8884"
        return f'<iframe style="{style}" srcdoc="{escape(self.html)}"></iframe>'


def show_picture(model: ModelLike | Partition, *, fold: bool | None = None) -> Picture:
    """Return the interactive graph of `model`, which a notebook shows as the value of a cell.

    Args:
        model, fold: as in `to_html`.

    Raises:
        ModelError: `model` cannot be read.

    Examples:
        >>> import onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]> f (float[N] x) => (float[N] y) {y = Exp(x)}
        ... ''')
        >>> og.plot.show_picture(og.onnx_derivative(model, note_primal=True))
        <Picture of 5 items: the value of a notebook's cell, or the page `html`>
    """
    scene = Scene(model)
    return Picture(_html_page_text(scene, fold), len(scene.items))


def _page_data(layered: LayeredScene, folded: set[int]) -> dict[str, Any]:
    """Return the data of `view.html`: boxes as SVG elements at (0, 0), which the page moves."""
    scene, hues = layered.scene, layered.scene.gradient_hues()
    items, groups = [], []
    for item in scene.items:
        width, height = placement.item_size(scene, item.id)
        svg = item_element(item, Box(0, 0, width, height), hues.get(item.id))
        shown = {"group": item.group, "tip": item.details}
        items.append({"svg": svg, "w": width, "h": height, **shown})
    for group in scene.groups:
        width, height = placement.folded_size(scene, group.id)
        svg, rows = folded_group_element(group, Box(0, 0, width, height)), layered.groups[group.id]
        cells = {
            "rows": [list(map(_html_id_of_cell, row)) for row in rows.rows],
            "links": [list(map(_html_id_of_cell, pair)) for pair in rows.links],
            "right": list(map(_html_id_of_cell, rows.right)),
        }
        shown = {"parent": group.parent, "title": group.title, "kind": group.kind}
        least = placement.title_width(scene, group.id)
        groups.append({"svg": svg, "w": width, "h": height, "least": least, **shown, **cells})
    return {
        "sizes": {name: getattr(placement, name) for name in ("GAP", "DOWN", "PAD", "HEAD")},
        "items": items,
        "groups": groups,
        "arrows": [
            [arrow.source, arrow.target, arrow.text, way]
            for arrow, way in zip(scene.arrows, layered.arrow_bends, strict=True)
        ],
        "folded": sorted(folded),
    }


def _html_id_of_cell(cell: Cell) -> str:
    return f"{cell[0][0]}{cell[1]}"
