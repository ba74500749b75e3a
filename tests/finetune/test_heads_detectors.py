"""New classes for detectors: several last layers at once, and what is behind them."""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import onnxgrad as og
from onnxgrad.model.notes import HEAD, read_metadata
from tests.support.errors import naming
from tests.support.exports import export_module
from tests.support.models import initializer_arrays, operator_names, parse_model
from tests.support.running import in_sweep, run, run_named

RNG = np.random.default_rng(0)
X = RNG.normal(size=(6, 4)).astype(np.float32)
W, V, U = (RNG.normal(size=(4, n)).astype(np.float32) for n in (3, 3, 2))


# -- networks of PyTorch ---------------------------------------------------------------------------


def yolov8(classes):
    """Heads of distributions of distances and of scores at two scales, decoded as YOLOv8 does."""
    import torch
    from torch import nn

    class Detect(nn.Module):
        bins = 4

        def __init__(self):
            super().__init__()
            self.classes = classes
            self.stem, self.down = nn.Conv2d(3, 6, 3, 2, 1), nn.Conv2d(6, 6, 3, 2, 1)
            self.cv2 = nn.ModuleList(nn.Sequential(nn.Conv2d(6, 16, 1)) for _ in range(2))
            self.cv3 = nn.ModuleList(
                nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.SiLU(), nn.Conv2d(6, classes, 1))
                for _ in range(2)
            )
            self.dfl = nn.Conv2d(self.bins, 1, 1, bias=False)

        def forward(self, x):
            first = nn.functional.silu(self.stem(x))
            maps = [first, nn.functional.silu(self.down(first))]
            joined = [
                torch.cat((box(m), score(m)), 1)
                for m, box, score in zip(maps, self.cv2, self.cv3, strict=True)
            ]
            parts = torch.cat([y.view(x.shape[0], self.classes + 16, -1) for y in joined], 2)
            box, scores = parts.split((16, self.classes), 1)
            box = box.view(x.shape[0], 4, self.bins, -1).transpose(2, 1).softmax(1)
            box = self.dfl(box).view(x.shape[0], 4, -1)
            return torch.cat((box * 8, scores.sigmoid()), 1)

    torch.manual_seed(0)
    return Detect()


def yolox(classes):
    """Heads of boxes, of whether there is an object, and of its class, as YOLOX decodes them."""
    import torch
    from torch import nn

    class Detect(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.down = nn.Conv2d(3, 6, 3, 2, 1), nn.Conv2d(6, 6, 3, 2, 1)
            self.reg_preds = nn.ModuleList(nn.Conv2d(6, 4, 1) for _ in range(2))
            self.obj_preds = nn.ModuleList(nn.Conv2d(6, 1, 1) for _ in range(2))
            self.cls_preds = nn.ModuleList(nn.Conv2d(6, classes, 1) for _ in range(2))

        def forward(self, x):
            first = nn.functional.silu(self.stem(x))
            maps = [first, nn.functional.silu(self.down(first))]
            heads = zip(maps, self.reg_preds, self.obj_preds, self.cls_preds, strict=True)
            joined = [
                torch.cat((reg(m), obj(m).sigmoid(), score(m).sigmoid()), 1)
                for m, reg, obj, score in heads
            ]
            y = torch.cat([z.flatten(2) for z in joined], 2).permute(0, 2, 1)
            centers, sizes = y[..., :2] * 8, y[..., 2:4].exp() * 8
            return torch.cat((centers, sizes, y[..., 4:]), -1), y[..., 4] * y[..., 5:].max(-1)[0]

    torch.manual_seed(0)
    return Detect()


def exported_detector(net, x, dynamo, fixed):
    import torch

    if dynamo:
        options = {} if fixed else {"dynamic_shapes": ({0: torch.export.Dim("N", min=1)},)}
    else:
        options = {} if fixed else {"dynamic_axes": {"x": {0: "N", 2: "H", 3: "W"}}}
    return export_module(net, (x,), dynamo=dynamo, input_names=["x"], opset_version=18, **options)


NETWORKS = {"yolov8": (yolov8, "cv3.*.2", 2), "yolox": (yolox, "cls_preds.*.weight", None)}


@pytest.mark.parametrize(
    ("name", "dynamo", "fixed", "classes"),
    [
        ("yolov8", False, False, 1),
        ("yolox", False, True, 7),
        in_sweep("yolov8", True, False, 7),
        in_sweep("yolov8", False, True, 7),
        in_sweep("yolox", True, True, 7),
        in_sweep("yolox", False, False, 7),
        in_sweep("yolox", True, False, 1),
    ],
)
def test_like_a_detector_of_pytorch(name, dynamo, fixed, classes):
    """Outputs equal those of the network with other layers at all scales, and the boxes stay."""
    torch = pytest.importorskip("torch")
    make, at, index = NETWORKS[name]
    net, x = make(3), torch.randn(2, 3, 16, 16)
    before = exported_detector(net, x, dynamo, fixed)
    model = og.replace_head(before, classes, at)
    onnx.checker.check_model(model, full_check=True)
    own = initializer_arrays(model)
    for i in range(2):
        new = torch.nn.Conv2d(6, classes, 1)
        new.load_state_dict(
            {k: torch.tensor(own[f"head.{i}.{k}"].copy()) for k in ("weight", "bias")}
        )
        if index is None:
            net.cls_preds[i] = new
        else:
            net.cv3[i][index] = new
    net.classes = classes
    wanted = net(x)
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    for y, expected in zip(run_named(model, x=x.numpy()).values(), wanted, strict=True):
        np.testing.assert_allclose(y, expected.detach(), rtol=1e-4, atol=1e-5)
    assert {t.name for t in og.trainable(model).trained} >= set(read_metadata(model, HEAD))
    with pytest.raises(ValueError, match=naming("together", "2 layers of 3")):
        og.replace_head(before, classes)


def test_metadata_of_a_detector():
    torch = pytest.importorskip("torch")
    model = exported_detector(yolov8(3), torch.randn(2, 3, 16, 16), False, True)
    for key, text in {"names": "{0: 'a', 1: 'b', 2: 'c'}", "stride": "32"}.items():
        model.metadata_props.add(key=key, value=text)
    new = og.replace_head(model, ["cat", "dog"], "cv3.*.2")
    found = {p.key: p.value for p in new.metadata_props}
    assert found["names"] == "{0: 'cat', 1: 'dog'}"
    assert found["stride"] == "32"


# -- what is behind the layers ---------------------------------------------------------------------


def boxes_and_scores(tail, **more):
    """A model of boxes x u and scores x w, joined as j of shape (N, 2 + 3) and read by `tail`."""
    text = f"f (float[N,4] x) => (float[N,M] y) {{ b = MatMul(x, u) s = MatMul(x, w) {tail} }}"
    numbers = {k: np.array(v, np.int64) for k, v in more.items()}
    return parse_model(text, w=W, u=U, **numbers)


JOIN = "j = Concat<axis=1>(b, s)"
BEHIND = {  # of boxes b and scores s
    "joined": (f"{JOIN} y = Identity(j)", {}, lambda b, s: np.hstack([b, s])),
    "joined in front": (
        "j = Concat<axis=-1>(s, b) y = Identity(j)", {}, lambda b, s: np.hstack([s, b])),
    "joined twice": (
        f"{JOIN} y = Concat<axis=1>(b, j, x)", {}, lambda b, s: np.hstack([b, b, s, X])),
    "split": (
        f"{JOIN} c, d = Split<axis=1>(j, n) e = Sigmoid(d) y = Concat<axis=1>(e, c)",
        {"n": [2, 3]}, lambda b, s: np.hstack([1 / (1 + np.exp(-s)), b])),
    "split evenly": (
        "j = Concat<axis=1>(s, x) c, d = Split<axis=1, num_outputs=2>(j) y = Concat<axis=1>(d, c)",
        {}, lambda b, s: np.hstack([X[:, 1:], s, X[:, :1]])),
    "sliced to the end": (
        f"{JOIN} c = Slice(j, two, most, one_) y = Neg(c)", {}, lambda b, s: -s),
    "sliced by bounds": (
        f"{JOIN} c = Slice(j, two, five, one_) y = Neg(c)", {}, lambda b, s: -s),
    "sliced from the end": (
        f"{JOIN} c = Slice(j, m3, most, one_) y = Neg(c)", {}, lambda b, s: -s),
    "sliced with a neighbor": (
        f"{JOIN} c = Slice(j, one_, five, one_) y = Neg(c)", {},
        lambda b, s: -np.hstack([b[:, 1:], s])),
    "boxes sliced": (
        f"{JOIN} c = Slice(j, zero, m3, one_) d = Slice(j, two, five, one_)"
        " y = Concat<axis=1>(d, c)", {}, lambda b, s: np.hstack([s, b])),
    "behind the units": (
        "j = Concat<axis=1>(s, b) c = Slice(j, three, five, one_) e = Gather<axis=1>(j, m1)"
        " g = Gather<axis=1>(j, four) y = Concat<axis=1>(j, c, e, g)", {},
        lambda b, s: np.hstack([s, b, b, b[:, 1:], b[:, 1:]])),
    "objects times classes": (
        f"{JOIN} o = Gather<axis=1>(j, one_) c = Slice(j, two, five, one_) y = Mul(c, o)", {},
        lambda b, s: s * b[:, 1:]),
    "scaled": (f"{JOIN} y = Mul(j, row)", {}, lambda b, s: np.hstack([2 * b, 7 * s])),
    "reshaped": (
        f"{JOIN} r = Reshape(j, to) t = Transpose<perm=[2, 1, 0]>(r) y = Reshape(t, back)",
        {"to": [-1, 5, 1], "back": [5, -1]}, lambda b, s: np.hstack([b, s]).T),
}  # fmt: skip


@pytest.mark.parametrize("units", [4, 1, in_sweep(3)])
@pytest.mark.parametrize("name", BEHIND)
def test_behind_units_that_share_their_axis(name, units):
    tail, more, formula = BEHIND[name]
    more = more | {
        "two": [2], "five": [5], "most": [2**62], "one_": [1], "m3": [-3], "m1": [-1], "zero": [0],
        "three": [3], "four": [4],
    }  # fmt: skip
    model = boxes_and_scores(tail, **more)
    row = np.array([2, 2, 7, 7, 7], np.float32)
    model.graph.initializer.append(numpy_helper.from_array(row, "row"))
    new = og.replace_head(model, units, "w")
    onnx.checker.check_model(new, full_check=True)
    wanted = formula(X @ U, X @ initializer_arrays(new)["head.weight"])
    np.testing.assert_allclose(run(new, x=X)[0], wanted, rtol=1e-4, atol=1e-5)


def test_bounds_that_are_attributes():
    """Before opset 10 and 13, Slice and Split have their numbers as attributes."""
    text = """f (float[N,4] x) => (float[N,3] y, float[N,2] z) {
        b = MatMul(x, u) s = MatMul(x, w) j = Concat<axis=1>(s, b)
        c, d = Split<axis=1, split=[3, 2]>(j)
        e = Slice<axes=[1], starts=[3], ends=[9]>(j) y = Neg(c) z = Add(d, e) }"""
    model = parse_model(text, opset=9, ir_version=4, u=U, w=W)
    new = og.replace_head(model, 8, "w")
    onnx.checker.check_model(new, full_check=True)
    y, z = run(new, x=X)
    np.testing.assert_allclose(y, -X @ initializer_arrays(new)["head.weight"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(z, 2 * X @ U, rtol=1e-4, atol=1e-5)


SCALES = """f (float[N,4] x) => (float[M,3] y) {
    h = Relu(x) b = Gemm(x, w, z) s = Gemm(h, w, z) c = MatMul(h, v) d = Add(c, z)
    y = Concat<axis=0>(b, s, d) }"""
Z = np.zeros(3, np.float32)


def test_layers_that_share_weights_share_the_new_ones():
    """As the head of FCOS, which reads all scales; `v` is another layer with the same bias."""
    new = og.replace_head(parse_model(SCALES, w=W, v=V, z=Z), 5, ["w", "v"])
    onnx.checker.check_model(new, full_check=True)
    own = initializer_arrays(new)
    assert own.keys() == {f"head.{i}.{k}" for i in range(2) for k in ("weight", "bias")}
    w, v, h = own["head.0.weight"], own["head.1.weight"], np.maximum(X, 0)
    assert not np.array_equal(w, v)
    wanted = np.vstack([X @ w, h @ w, h @ v])
    np.testing.assert_allclose(run(new, x=X)[0], wanted, rtol=1e-4, atol=1e-5)
    again = og.replace_head(new, 2, "head.*.weight", seed=3)
    assert initializer_arrays(again).keys() == own.keys()
    assert set(read_metadata(again, HEAD)) == own.keys()
    alone = og.replace_head(parse_model(SCALES.replace(", d)", ")"), w=W, v=V, z=Z), 5, "w")
    assert initializer_arrays(alone).keys() >= {"head.weight", "head.bias"}


@pytest.mark.parametrize("at", ["?", ["v", "w"], ["node 0", "node 1"], "node *"])
def test_layers_of_several_outputs(at):
    text = "f (float[N,4] x) => (float[N,3] y, float[N,3] z) { y = MatMul(x, w) z = MatMul(x, v) }"
    model = parse_model(text, w=W, v=V)
    for i, node in enumerate(model.graph.node):
        node.name = f"node {i}"
    new = og.replace_head(model, 5, at)
    w, v = (
        initializer_arrays(new)[f"head.{i}.weight"]
        for i in ((1, 0) if at == ["v", "w"] else (0, 1))
    )
    for y, wanted in zip(run(new, x=X), (X @ w, X @ v), strict=True):
        np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-5)


REFUSED = {
    "some of the units": (
        "j = Concat<axis=1>(b, s) y = Slice(j, zero, m1, one)", "w", "Slice.*selects"),
    "one of the units": ("j = Concat<axis=1>(b, s) y = Gather<axis=1>(j, two)", "w", "Gather.*sel"),
    "units cut": ("j = Concat<axis=1>(b, s) y, d = Split<axis=1>(j, sizes)", "w", "Split.*selects"),
    "labels": (
        "j = Concat<axis=1>(b, s) k = ArgMax<axis=1>(j) y = Cast<to=1>(k)", "w",
        "ArgMax.*other values beside"),
    "one scale of two": (
        "h = MatMul(x, v) y = Concat<axis=0>(s, h)", "w", "Concat.*'h': name the layers of these"),
    "units of two along one axis": (
        "h = MatMul(x, v) y = Concat<axis=1>(s, h)", ["w", "v"], "Concat.*several layers along"),
    "numbers for each unit": ("j = Concat<axis=1>(b, s) y = Mul(j, row)", "w", "Mul.*each unit"),
    "different numbers": (
        "y = Concat<axis=1>(b, s)", ["u", "w"], r"differ in their units.*\(2 units\).*\(3 units"),
    "none": ("y = Neg(s)", [], r"at=\[\]: pass the name of at least one layer"),
    "unknown among several": ("y = Neg(s)", ["w", "q"], "Unknown layer"),
    "no layer among several": ("y = Neg(s)", ["w", "y"], "Neg.*no linear"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_detectors_that_are_refused(name):
    tail, at, message = REFUSED[name]
    numbers = {"zero": [0], "m1": [-1], "one": [1], "two": [2], "sizes": [3, 2]}
    model = boxes_and_scores(tail, **numbers)
    for extra, array in {"row": np.arange(5), "v": V}.items():
        model.graph.initializer.append(numpy_helper.from_array(array.astype(np.float32), extra))
    with pytest.raises(ValueError, match=message):
        og.replace_head(model, 4, at)


@pytest.mark.parametrize("activation", ["softmax", None])
def test_activation_of_units_that_share_their_axis(activation):
    apart = boxes_and_scores("t = Sigmoid(s) y = Concat<axis=1>(b, t)")
    new = og.replace_head(apart, 4, "w", activation=activation)
    s = X @ initializer_arrays(new)["head.weight"]
    e = np.exp(s)
    wanted = e / e.sum(1, keepdims=True) if activation else s
    np.testing.assert_allclose(run(new, x=X)[0], np.hstack([X @ U, wanted]), rtol=1e-4, atol=1e-5)
    together = boxes_and_scores("j = Concat<axis=1>(b, s) y = Sigmoid(j)")
    with pytest.raises(ValueError, match=r"activation=.*other values"):
        og.replace_head(together, 4, "w", activation=activation)
    if activation:
        with pytest.raises(ValueError, match=naming("other values", "units")):
            og.replace_head(
                boxes_and_scores("y = Concat<axis=1>(b, s)"), 4, "w", activation=activation
            )


def test_one_class_of_a_detector_stays_a_sigmoid():
    """A box may be of several classes; the sigmoid of a classifier becomes a softmax."""
    model = parse_model(
        "f (float[N,4] x) => (float[N,3] y) { b = MatMul(x, u) s = MatMul(x, v) t = Sigmoid(s)"
        " y = Concat<axis=1>(b, t) }", u=U, v=V[:, :1])  # fmt: skip
    new = og.replace_head(model, 2, "v")
    assert operator_names(new).count("Sigmoid") == 1
