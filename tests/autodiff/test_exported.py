"""Models as torch and scikit-learn export them."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from onnxgrad import (
    Trainer,
    add_loss_output,
    check_gradient,
    explain,
    hvp,
    jacobian,
    onnx_derivative,
)
from onnxgrad.artifacts import generate_artifacts
from onnxgrad.compat import OrtGradientOptimizer
from onnxgrad.reporting import warn_once
from tests.support.errors import naming
from tests.support.exports import export_module
from tests.support.models import initializer_arrays, parse_model
from tests.support.running import in_sweep, run, run_named
from tests.support.signatures import input_names


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")  # exported in training mode
def test_exported_transformer_encoder_as_torch(tmp_path):
    torch = pytest.importorskip("torch")
    pytest.importorskip("onnxscript")

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(11, 8)
            layer = torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, "gelu", batch_first=True)
            self.encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = torch.nn.Linear(8, 3)

        def forward(self, ids):
            return self.head(self.encoder(self.embed(ids)).mean(1))

    torch.manual_seed(0)
    net = Net().train()
    for p in net.parameters():  # the layers start as copies, which the exporter shares
        torch.nn.init.normal_(p, std=0.3)
    sizes = {0: torch.export.Dim("N"), 1: torch.export.Dim("T")}
    example = torch.ones(2, 5, dtype=torch.int64)
    model = export_module(net, (example,), dynamo=True, train=True, dynamic_shapes=(sizes,))
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 11, (4, 7))
    g = rng.standard_normal((4, 3)).astype(np.float32)
    net(torch.tensor(ids)).backward(torch.tensor(g))
    parameters = dict(net.named_parameters())
    names = [n for n in initializer_arrays(model) if n in parameters]
    assert len(names) > 8  # the others are stored transposed, under other names
    report = check_gradient(model, feed={model.graph.input[0].name: ids})
    assert report.ok, str(report)
    assert sum(len(row.names) for row in report.rows) > 24
    made = onnx_derivative(model, names, [])
    [data, *rest] = input_names(made)
    found = run_named(
        made, {data: ids, rest[-1]: g, **{n: initializer_arrays(model)[n] for n in names}}
    )
    for name in names:
        expected = parameters[name].grad.numpy()
        scale = max(abs(expected).max(), 1e-3)
        np.testing.assert_allclose(
            found[f"{name}_grad"] / scale, expected / scale, atol=2e-5, err_msg=name
        )


def test_the_tensor_in_a_zipmap_is_used():
    skl2onnx = pytest.importorskip("skl2onnx")
    from sklearn.linear_model import LogisticRegression

    x = np.random.default_rng(0).standard_normal((30, 2)).astype(np.float32)
    model = skl2onnx.to_onnx(LogisticRegression().fit(x, x[:, 0] > 0), x[:1], target_opset=18)
    assert "probabilities_grad" in [x.name for x in onnx_derivative(model).graph.input]
    made = add_loss_output(model, "log")
    assert [y.name for y in made.graph.output] == ["loss", "probabilities"]
    with pytest.raises(ValueError, match=naming("no tensor", "'probabilities'")):
        add_loss_output(model, "log", output_index="output_probability")
    made = add_loss_output(model, "log", output_index="probabilities")
    assert [y.name for y in made.graph.output] == ["loss", "probabilities"]


def _shapes_of_ranks(torch) -> dict:
    """Return functions that PyTorch exports with an If on a rank, or on sizes."""
    joins = {n: getattr(torch, n) for n in ("column_stack", "hstack", "vstack", "dstack")}
    joined = {f"{n} {k}": (f, k) for n, f in joins.items() for k in ("vectors", "matrices")}
    ones = {f"atleast_{n}d": getattr(torch, f"atleast_{n}d") for n in (1, 2, 3)}
    return {name: (lambda a, b, f=f: 2 * f([a, b]), k) for name, (f, k) in joined.items()} | {
        **{name: (lambda a, b, f=f: f(a) * f(b), "vectors") for name, f in ones.items()},
        "tile": (lambda a, b: torch.tile(a, (3, 2)) * 1.5 + torch.tile(b, (2,)), "vectors"),
        "tile matrices": (lambda a, b: torch.tile(a * b, (2,)), "matrices"),
    }


NAMES = [
    *(f"{n} {k}" for n in ("column_stack", "hstack", "vstack", "dstack")
      for k in ("vectors", "matrices")),
    *(f"atleast_{n}d" for n in (1, 2, 3)), "tile", "tile matrices",
]  # fmt: skip
BRANCHES = [(name, how) for how in ("legacy", "legacy, any length", "dynamo") for name in NAMES]
QUICK = [("hstack vectors", "legacy"), ("tile matrices", "legacy"), ("vstack vectors", "dynamo"),
         ("tile", "legacy, any length"), ("dstack matrices", "legacy, any length")]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "exporter"), [b if b in QUICK else in_sweep(*b) for b in BRANCHES]
)
def test_branches_that_cannot_run(name, exporter):
    torch = pytest.importorskip("torch")
    pytest.importorskip("onnxscript")
    function, kind = _shapes_of_ranks(torch)[name]

    class Net(torch.nn.Module):
        def forward(self, a, b):
            return function(a, b)

        def extra_repr(self):
            return name  # which tells the exports apart

    torch.manual_seed(0)
    operands = [torch.randn((4,) if kind == "vectors" else (4, 3)) for _ in range(2)]
    options = {"dynamic_axes": {"a": {0: "N"}, "b": {0: "N"}}} if "any" in exporter else {}
    options |= {"input_names": ["a", "b"], "output_names": ["y"]}
    try:
        model = export_module(Net(), operands, dynamo=exporter == "dynamo", **options)
    except torch.onnx.errors.UnsupportedOperatorError:
        pytest.skip("the exporter does not know the operator")
    fed = {name: x.numpy() for name, x in zip("ab", operands, strict=True)}
    try:
        [y] = run(model, fed)
    except ort.capi.onnxruntime_pybind11_state.Fail:
        pytest.skip("onnxruntime refuses the file")
    leaves = [x.clone().requires_grad_() for x in operands]
    g = torch.randn(y.shape)
    expected = torch.autograd.grad(function(*leaves), leaves, g)
    found = run_named(onnx_derivative(model, weights=[]), fed, y_grad=g.numpy())
    for x, want in zip("ab", expected, strict=True):
        np.testing.assert_allclose(found[f"{x}_grad"], want.numpy(), rtol=1e-5, atol=1e-6)


def test_one_symbol_for_several_axes_of_an_output(caplog):
    """PyTorch's exporter numbers such symbols by the node, and gives rows and height the same."""
    model = parse_model("""g (float[N,2,5,6] x, int64[8] pads) => (float[d, 3, d, e] y)
        <float[3,2,1,1] w = {1,2,3,4,5,6}> { p = Pad(x, pads)  y = Conv(p, w) }""")
    pads = np.array([0, 0, 1, 1, 0, 0, 1, 1])
    x = np.ones((2, 2, 5, 6), np.float32)
    fed = {"x": x, "pads": pads, "x_vector": x}
    [y] = run(model, fed)
    fed |= {"y_grad": np.ones_like(y), "w": initializer_arrays(model)["w"]}
    run(hvp(model), fed)
    run(onnx_derivative(model), fed)
    assert caplog.text.count("'d' for several axes") == 1
    with_loss = add_loss_output(model)
    label = next(v for v in with_loss.graph.input if v.name == "label")
    assert [d.dim_param for d in label.type.tensor_type.shape.dim][2] != "d"


LYING = {  # how y is computed from z (N, 2), and whether onnx can infer its shape
    "inferred": ("y = Identity(z)", (2,)),
    "only run": ("s = Shape(z)  b = Cast<to=9>(s)  k = Compress(s, b)  y = Reshape(z, k)", (2,)),
    "only run, three axes": (
        """u = Unsqueeze(z, one)  s = Shape(u)  b = Cast<to=9>(s)  k = Compress(s, b)
        y = Reshape(u, k)""",
        (1, 2),
    ),
}
STATED = ["[N]", "[N, 2, 1, 1]", "[N, 5]", "[2, N]", "[7, 2]", "[N, 2, 1]", ""]
QUICK_LIES = [("inferred", "[N, 5]"), ("only run", "[N]"), ("only run", "[7, 2]"),
              ("only run, three axes", "[2, N]")]  # fmt: skip


@pytest.mark.parametrize(
    ("way", "stated"),
    [
        (way, stated) if (way, stated) in QUICK_LIES else in_sweep(way, stated)
        for way in LYING
        for stated in STATED
    ],
)
def test_an_output_that_states_another_shape(way, stated, caplog, tmp_path):
    """What it states is dropped, and the result is that of a file that states nothing."""
    body, row = LYING[way]
    text = f"""g (float[N, 3] x) => (float{stated} y)
        <float[3, 4] w = {{0.1,-0.2,0.3,0.4,0.5,-0.6,0.7,0.8,0.9,1,-1.1,1.2}}, int64[1] one = {{1}},
         float[4, 2] v = {{0.2,-0.3,0.4,0.1,-0.5,0.6,0.7,-0.8}}> {{
            h = MatMul(x, w)  t = Tanh(h)  z = MatMul(t, v)  {body} }}"""
    model, plain = parse_model(text), parse_model(text, output_shapes=False)
    rng, target = np.random.default_rng(0), (1,) * len(row)
    x, y = (rng.standard_normal((6, *s)).astype(np.float32) for s in ((3,), row))
    results = []
    warn_once.cache_clear()
    for each in (model, plain):
        trainer = Trainer(each, loss="squared_error", optimizer="sgd", learning_rate=0.1)
        trainer.fit(x, y, epochs=2, batch_size=2)
        saved = tmp_path / "saved.onnx"
        trainer.save(saved)
        inside = OrtGradientOptimizer(
            add_loss_output(each), max_iter=2, batch_size=3, random_state=0
        )
        generate_artifacts(each, loss="squared_error", artifact_directory=tmp_path)
        g = run_named(onnx_derivative(each, weights=[]), {"x": x, "y_grad": y})
        results.append(
            [
                trainer.predict(x),
                run(onnx.load(saved), {"x": x})[0],
                np.array(list(trainer.evaluate(x, y).values())),
                np.array(inside.fit(x, y).train_losses_),
                g["x_grad"],
                *run(jacobian(each), {"x": x}),
                explain.saliency(each, x[:2], target=tuple(t - 1 for t in target)),
            ]
        )
    one_batch = way == "only run" and stated == "[7, 2]"  # 7 counts as the rows of one batch
    assert ("file states" in caplog.text) != one_batch
    if stated.startswith("[N"):
        assert f"(?{stated[2:-1]}" in caplog.text  # and in the next file, if it states another one
    for found, expected in zip(*results, strict=True):
        np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=1e-5, atol=1e-6)
