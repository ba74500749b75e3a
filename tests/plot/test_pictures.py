"""Graphs as SVG and as interactive pages, which Chromium opens where it is installed."""

from __future__ import annotations

import re
import shutil
from itertools import combinations
from xml.etree import ElementTree

import numpy as np
import onnx
import pytest

import onnxgrad as og
from onnxgrad.plot.layering import LayeredScene
from onnxgrad.plot.placement import lay_out_model, spread_positions
from onnxgrad.plot.scene import Scene
from tests.support.drawn_models import (
    ATTRIBUTES,
    BRANCHES,
    MLP,
    ODD_NAMES,
    SEED,
    joint_gradient,
    oddly_named_model,
)
from tests.support.models import parse_model
from tests.support.running import in_sweep

NS = "{http://www.w3.org/2000/svg}"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def module_chain(count: int) -> onnx.ModelProto:
    """Return a model in modules of 10 nodes, with a shortcut over each."""
    lines = [
        f"h{i + 1} = Add(h{i}, h{i - 9})" if i % 10 == 9 else f"h{i + 1} = Relu(h{i})"
        for i in range(count)
    ]
    model = parse_model(
        f'<ir_version: 9, opset_import: ["": 20]> f (float[N,2] h0) => (float[N,2] h{count})'
        f"{{{' '.join(lines)}}}"
    )
    for i, node in enumerate(model.graph.node):
        node.name = f"/net/stage.{i // 100}/block{i % 100 // 10}/{node.op_type}_{i}"
    return model


def boxes_of_svg(svg: str) -> list[tuple[str, str, list[float]]]:
    """Return classes, title and rectangle of every box."""
    found = []
    for g in ElementTree.fromstring(svg).iter(f"{NS}g"):
        names = g.get("class", "")
        rect, text = g.find(f"{NS}rect"), g.find(f"{NS}text")
        if names.startswith("box"):
            found.append(
                (names, text.text, [float(rect.get(k)) for k in "x y width height".split()])
            )
    return found


MODELS = {"seed": SEED, "branches": BRANCHES, "attributes": ATTRIBUTES}


@pytest.mark.parametrize(
    ("name", "fold"),
    [
        *[(name, False) for name in (*MODELS, "odd", "chain", "gradient")],
        ("chain", True),
        *[in_sweep(name, True) for name in (*MODELS, "odd", "gradient")],
    ],
)
def test_boxes_do_not_overlap_and_arrows_end_at_them(name, fold):
    other = {
        "odd": oddly_named_model,
        "chain": lambda: module_chain(60),
        "gradient": joint_gradient,
    }
    svg = og.to_svg(other[name]() if name in other else parse_model(MODELS[name]), fold=fold)
    found = boxes_of_svg(svg)
    assert found
    for (_, _, (a, b, w, h)), (_, _, (c, d, u, v)) in combinations(found, 2):
        assert a + w <= c or c + u <= a or b + h <= d or d + v <= b
    edges = [
        (x, y) for *_, (a, b, w, h) in found for x, y in
        [(a + w / 2, b), (a + w / 2, b + h), (a, b + h / 2), (a + w, b + h / 2)]
    ]  # fmt: skip
    paths = [
        p.get("d") for p in ElementTree.fromstring(svg).iter(f"{NS}path") if p.get("marker-end")
    ]
    assert paths
    for path in paths:
        numbers = [float(n) for n in re.findall(r"-?\d+\.\d", path)]
        for point in (numbers[:2], numbers[-2:]):
            assert min(np.abs(np.subtract(edges, point)).max(1)) < 0.2


def test_what_boxes_and_tooltips_say():
    svg = og.to_svg(parse_model(MLP))
    assert [title for _, title, _ in boxes_of_svg(svg)] == [
        "x",
        "MatMul",
        "Tanh",
        "Softplus",
        "Mul",
        "y",
    ]
    texts = [t.text for t in ElementTree.fromstring(svg).iter(f"{NS}title")]
    assert "MatMul\n-> h float32[N, 1]" in [re.sub(r"w float32.*\n", "", t) for t in texts]
    assert any("w float32[2, 1] = [[1.0], [2.0]]" in t for t in texts)
    assert "t float32[N, 1]" in texts  # of an arrow
    heights = {title: rect[1] for _, title, rect in boxes_of_svg(svg)}
    assert heights["x"] < heights["MatMul"] < heights["Tanh"] < heights["Softplus"] < heights["Mul"]


def test_names_are_data():
    svg = og.to_svg(oddly_named_model())
    texts = {t.text for t in ElementTree.fromstring(svg).iter(f"{NS}text")}
    assert {ODD_NAMES[0], ODD_NAMES[-1]} <= texts
    model = parse_model(MLP)
    model.graph.input[0].name = model.graph.node[0].input[0] = "</script><script>alert(1)</script>"
    assert "<script>alert" not in og.to_html(model, title="</title><script>alert(2)")
    assert r"\u003cscript>alert(1)" in og.to_html(model)
    assert "<script>" not in og.plot.show_picture(model)._repr_html_()


def test_frames_of_branches_and_modules():
    frames = re.findall(
        r'class="frame (\w+)">.*?<text[^>]*>([^<]*)<', og.to_svg(parse_model(BRANCHES))
    )
    assert ("subgraph", "If: then_branch") in frames
    assert ("function", "own.twice") in frames
    titles = re.findall(r'class="frame module">.*?<text[^>]*>([^<]*)<', og.to_svg(module_chain(20)))
    assert titles == ["net.stage.0", "block0", "block1"]
    folded = [
        title
        for names, title, _ in boxes_of_svg(og.to_svg(module_chain(20), fold=True))
        if "folded" in names
    ]
    assert folded == ["▸ net.stage.0 (20)"]


def test_large_models_are_folded_to_a_readable_size():
    model = module_chain(800)
    assert 10 <= len(boxes_of_svg(og.to_svg(model))) <= 100
    assert len(boxes_of_svg(og.to_svg(model, fold=False))) == 802


@pytest.mark.parametrize(
    ("noted", "module"),
    [(True, "/layer{}/"), in_sweep(True, ""), in_sweep(False, ""), in_sweep(False, "/layer{}/")],
)
def test_the_page_of_a_gradient_grows_as_its_nodes(noted, module):
    """Each node of the backward pass reads one of the forward pass, many rows away."""
    per_node = []
    for count in (40, 160):
        nodes = [f"a{i} = MatMul(t{i}, w)  t{i + 1} = Tanh(a{i})" for i in range(count)]
        model = parse_model(f"""<ir_version: 10, opset_import: ["": 18]>
            f (float[N, 2] t0) => (float[N, 2] t{count})
            <float[2, 2] w = {{0.1, 0.2, 0.3, 0.4}}> {{ {"  ".join(nodes)} }}""")
        for i, node in enumerate(model.graph.node):
            node.name = module and module.format(i // 2) + node.op_type
        gradient = og.onnx_derivative(model, note_primal=noted)
        layered, nodes = LayeredScene(Scene(gradient)), len(gradient.graph.node)
        cells = sum(len(row) for rows in layered.groups.values() for row in rows.rows)
        per_node.append((len(og.to_html(gradient)) / nodes, cells / nodes))
    assert np.all(np.divide(*per_node[::-1]) < 1.4)


def test_constants_are_no_boxes():
    model = parse_model("""<ir_version: 9, opset_import: ["": 20]>
        f (float[2] x) => (float[2] y, float[1] c) <float[2] w = {1, 2}>
        { c = Constant<value = float[1] {3}>() n = Constant<value_floats = [4.0]>()
          v = Identity(w) a = Mul(x, v) b = Add(a, c) y = Sub(b, n) }""")
    svg = og.to_svg(model)
    assert [title for _, title, _ in boxes_of_svg(svg)] == ["x", "c", "Mul", "Add", "Sub", "y"]
    texts = {t.text for t in ElementTree.fromstring(svg).iter(f"{NS}text")}
    assert {"v = [1.0, 2.0]", "c = [3.0]", "n value_floats=[4]"} <= texts


def test_long_names_of_constants_are_cut():
    names = "a" * 18, "b" * 17 + "cd"
    model = parse_model(f"""<ir_version: 9, opset_import: ["": 20]>
        f (float[1] x) => (float[1] y) <float[1] {names[0]} = {{1}}, float[1] {names[1]} = {{2}}>
        {{ h = Add(x, {names[0]}) y = Add(h, {names[1]}) }}""")
    texts = {t.text for t in ElementTree.fromstring(og.to_svg(model)).iter(f"{NS}text")}
    assert {f"{names[0]} = [1.0]", f"...{names[1][-15:]} = [2.0]"} <= texts


def test_a_broken_model_is_drawn():
    made = parse_model(MLP)
    made.graph.node[2].input[0] = "nothing"
    made.graph.node.add(op_type="Identity")
    assert "nothing: not" in og.to_svg(made)


def test_forward_and_backward_stand_side_by_side():
    parts = og.partition(joint_gradient(), recompute="all")
    svg = og.to_svg(parts)
    found = boxes_of_svg(svg)
    backward = [rect for names, _, rect in found if "backward" in names]
    forward = [(names, title, rect) for names, title, rect in found if "node" in names.split()]
    forward = [f for f in forward if "backward" not in f[0]]
    assert {title for _, title, _ in forward} == {
        "MatMul", "Tanh", "Softplus", "Mul", "com.microsoft.YieldOp"}  # fmt: skip
    assert min(rect[0] for rect in backward) > max(rect[0] + rect[2] for *_, rect in forward)
    rows = {title: rect[1] for _, title, rect in found if title in ("MatMul", "w_grad", "y_grad")}
    assert rows["w_grad"] <= rows["MatMul"]  # the backward pass goes up
    producers = {y: node.op_type for node in parts.joint.graph.node for y in node.output}
    saved = {producers[s.name] for s in parts.saved if s.name in producers}
    again = {n.op_type for n in parts.backward.graph.node} & {"MatMul", "Tanh", "Softplus"}
    marked = {
        kind: {t for names, t, _ in forward if kind in names} for kind in ("saved", "recomputed")
    }
    assert marked["saved"] == saved
    assert marked["recomputed"] == again - saved
    assert again


def test_a_gradient_node_has_the_color_of_its_primal():
    scene = Scene(joint_gradient())
    hue = scene.gradient_hues()
    primals = {item.first: hue.get(item.id) for item in scene.items if item.first}
    served = [(item.primal, hue[item.id]) for item in scene.items if item.primal]
    assert served
    assert all(primals[name] == color for name, color in served)
    assert len({color for _, color in served}) == len({name for name, _ in served})


def test_spread_is_a_regression():
    sklearn = pytest.importorskip("sklearn.isotonic")
    rng = np.random.default_rng(0)
    wished, gaps = rng.normal(size=30) * 40, rng.uniform(1, 5, 29)
    offsets = np.r_[0, np.cumsum(gaps)]
    expected = sklearn.isotonic_regression(wished - offsets) + offsets
    np.testing.assert_allclose(spread_positions(list(wished), list(gaps)), expected, rtol=1e-9)


# -- in a browser ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


def open_page(browser, tmp_path, html, errors, **options):
    """Open a page; whatever it logs, raises or requests goes to `errors`."""
    file = tmp_path / "page.html"
    file.write_text(html, "utf-8")
    page = browser.new_page(**options)
    page.on("console", lambda message: errors.append(message.text))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda r: None if r.url == file.as_uri() else errors.append(r.url))
    page.goto(file.as_uri())
    page.wait_for_selector("html[data-ready]", state="attached")
    return page


def box_places(page) -> list[list[float]]:
    """Return corner and size of each box, which stands at (0, 0) of a moved element."""
    return page.evaluate("""[...document.querySelectorAll('.box>rect:first-child')].map(rect => {
        const {e, f} = rect.parentNode.parentNode.transform.baseVal[0].matrix;
        return [e, f, ...['x', 'y', 'width', 'height'].map(k => +rect.getAttribute(k))]; })""")


def test_the_page_places_boxes_as_the_svg(browser, tmp_path):
    errors: list[str] = []
    for model in (parse_model(BRANCHES), module_chain(60), joint_gradient()):
        page = open_page(browser, tmp_path, og.to_html(model), errors)
        expected = [
            [box.x, box.y, 0, 0, box.width, box.height]
            for (kind, i), box in lay_out_model(model, None).drawn_cells()
            if kind == "item"
        ]
        np.testing.assert_allclose(sorted(box_places(page)), sorted(expected), atol=1e-4)
        page.close()
    assert not errors


@pytest.mark.parametrize("scheme", [in_sweep("light"), "dark"])
def test_fold_search_zoom_and_tooltip(browser, tmp_path, scheme):
    errors: list[str] = []
    html = og.to_html(module_chain(800))
    page = open_page(browser, tmp_path, html, errors, color_scheme=scheme)
    first = page.locator(".box").count()
    assert first <= 100
    page.click(".folded >> nth=1")
    assert page.locator(".box").count() > first
    page.fill("#search", "relu_501")
    assert page.inner_text("#count") == "1 found"
    page.press("#search", "Enter")
    hit = page.locator(".hit")
    assert hit.count() == 1
    assert hit.locator("text").first.text_content() == "Relu"
    box = hit.bounding_box()
    assert abs(box["x"] + box["width"] / 2 - 640) < 3  # in the middle of the window
    assert "/net/stage.5/block0/Relu_501" in page.inner_text("#info")
    assert "float32[N, 2]" in page.inner_text("#info")
    before = page.locator("#all").get_attribute("transform")
    page.mouse.move(640, 500)
    page.mouse.wheel(0, -300)
    page.wait_for_function(
        "t=>document.getElementById('all').getAttribute('transform')!==t", arg=before
    )
    page.click("#fold")
    assert page.locator(".box").count() == 3
    page.click("#unfold")
    assert page.locator(".box").count() == 802
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert paper == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 24, 31)"}[scheme]
    assert not errors


def test_in_a_notebook(browser, tmp_path):
    errors: list[str] = []
    file = tmp_path / "notebook.html"
    file.write_text(
        f"<!doctype html>{og.plot.show_picture(parse_model(MLP))._repr_html_()}", "utf-8"
    )
    page = browser.new_page()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(file.as_uri())
    frame = page.frame_locator("iframe")
    frame.locator(".box >> nth=0").wait_for()
    assert frame.locator(".box").count() == 6
    assert not errors
