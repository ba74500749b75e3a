"""Artifacts train by plain onnxruntime as `Trainer` does, and give the same model."""

from __future__ import annotations

import json

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper
from safetensors.numpy import load_file, save_file

import onnxgrad as og
from onnxgrad.artifacts import models
from onnxgrad.artifacts.generate import FORMER_OPTIMIZERS
from onnxgrad.model import external
from tests.support.commands import refusal, succeed
from tests.support.errors import naming
from tests.support.models import initializer_arrays, operator_names, parse_model
from tests.support.pages import code_of
from tests.support.paths import DOCS, ROOT
from tests.support.running import in_sweep, run

STEPS, ROWS, RATE = 24, 8, 0.02
MLP = """
    f (float[N,4] x) => (float[N,3] y) {
        h = MatMul(x, w1)  hb = Add(h, b1)  r = Gelu(hb)  z = MatMul(r, w2)  y = Add(z, b2)
    }"""
CNN = """
    f (float[N,2,6,6] x) => (float[N,3] y) {
        c = Conv <kernel_shape = [3,3], pads = [1,1,1,1]> (x, k)
        n = BatchNormalization (c, scale, bias, mean, var)
        r = Relu(n)  p = GlobalAveragePool(r)  flat = Flatten(p)  y = Gemm(flat, w2, b2)
    }"""
TRANSFORMER = """
    f (int64[N,5] x) => (float[N,5,11] y) <int64[3] heads = {0, 5, 8}> {
        e = Gather(table, x)
        q = MatMul(e, wq)  k = MatMul(e, wk)  v = MatMul(e, wv)
        kt = Transpose <perm = [0,2,1]> (k)
        s = MatMul(q, kt)  a = Softmax <axis = -1> (s)  o = MatMul(a, v)
        sum = Add(e, o)
        normal = LayerNormalization <axis = -1> (sum, scale, bias)
        y = MatMul(normal, w2)
    }"""
WEIGHTS = {
    "mlp": {"w1": (4, 8), "b1": (8,), "w2": (8, 3), "b2": (3,)},
    "cnn": {"k": (5, 2, 3, 3), "scale": (5,), "bias": (5,), "mean": (5,), "var": (5,)}
    | {"w2": (5, 3), "b2": (3,)},
    "transformer": {"table": (11, 8), "wq": (8, 8), "wk": (8, 8), "wv": (8, 8)}
    | {"scale": (8,), "bias": (8,), "w2": (8, 11)},
}
TEXTS = {"mlp": MLP, "cnn": CNN, "transformer": TRANSFORMER}
MODES = {"cnn": {"batch_norm": "train"}}
OPTIMIZERS = {
    "sgd": ("SGD", {}),
    "adamw": (og.optimizers.adamw(weight_decay=0.1), {}),
    "clipped": (og.optimizers.momentum(), {"clip_norm": 0.05}),
}


def artifact_model(name: str, opset: int = 20) -> onnx.ModelProto:
    rng = np.random.default_rng(3)
    arrays = {
        weight: rng.normal(size=shape, scale=0.4).astype(np.float32)
        for weight, shape in WEIGHTS[name].items()
    }
    if "var" in arrays:
        arrays["var"] = np.abs(arrays["var"]) + 0.5
    return parse_model(TEXTS[name], opset=opset, ir_version=10, **arrays)


def named_data(name: str) -> tuple[np.ndarray, np.ndarray]:
    rng, rows = np.random.default_rng(7), STEPS * ROWS
    if name == "transformer":
        x = rng.integers(0, 11, (rows, 5))
        return x, (x + 1).transpose(0, 1).clip(0, 10)
    x = rng.normal(size=(rows, 4) if name == "mlp" else (rows, 2, 6, 6)).astype(np.float32)
    return x, rng.integers(0, 3, rows)


def named_loss(name: str) -> dict:
    if name == "transformer":  # (N, 5, classes)
        return {"loss": "cross_entropy", "loss_options": {"axis": -1}}
    return {"loss": "cross_entropy"}


class ArtifactClient:
    """A folder of artifacts, trained by nothing but onnxruntime."""

    def __init__(self, folder, suffix=".onnx"):
        self.folder, self.suffix = folder, suffix
        self.manifest = json.loads((folder / "training.json").read_text())
        self.state = load_file(folder / "checkpoint.safetensors")
        self.sessions = {}

    def names(self, kind):
        return [entry["name"] for entry in self.manifest[kind]]

    def run(self, key, feed):
        if key not in self.sessions:
            file = {"step": "step", "training": "training_model", "eval": "eval_model"}
            path = self.folder / (file.get(key, "optimizer_model") + self.suffix)
            self.sessions[key] = ort.InferenceSession(path)
        session = self.sessions[key]
        fed = {x.name: np.asarray(feed[x.name]) for x in session.get_inputs()}
        names = [y.name for y in session.get_outputs()]
        return dict(zip(names, session.run(None, fed), strict=True))

    def scalars(self, number, rate=RATE):
        dtypes = {s["name"]: s["dtype"] for s in self.manifest["scalars"]}
        values = {"minus_learning_rate": -rate, "step": number + 1, "draw": number}
        return {n: np.array(v, dtypes.get(n, "int64")) for n, v in values.items()}

    def step(self, number, batch):
        out = self.run("step", {**self.state, **batch, **self.scalars(number)})
        self.state = {name: out[f"{name}.new"] for name in self.state}
        return float(out["loss"])

    def step_by_halves(self, number, batch):
        out = self.run("training", {**self.state, **batch, **self.scalars(number)})
        gradients = {n: a for n, a in out.items() if n.endswith("_grad")}
        new = self.run("optimizer", {**self.state, **gradients, **self.scalars(number)})
        self.state = {name: (new | out)[f"{name}.new"] for name in self.state}
        return float(out["loss_sum"] / out["loss_count"])

    def train(self, batches, step=None):
        return [(step or self.step)(number, batch) for number, batch in enumerate(batches)]


def labeled_batches(x, y):
    for i in range(0, len(x), ROWS):
        yield {"x": x[i : i + ROWS], "label": y[i : i + ROWS]}


def generate_client(name, folder, optimizer="SGD", **more):
    og.artifacts.generate_artifacts(
        artifact_model(name), optimizer=optimizer, artifact_directory=folder,
        **{**named_loss(name), **MODES.get(name, {}), **more},
    )  # fmt: skip
    return ArtifactClient(folder)


@pytest.fixture(scope="module")
def mlp_folder(tmp_path_factory):
    """The folder of the artifacts of the MLP, which no test changes."""
    return generate_client("mlp", tmp_path_factory.mktemp("mlp")).folder


def named_trainer(name, optimizer="sgd", **more):
    return og.Trainer(
        artifact_model(name), optimizer=optimizer, learning_rate=RATE,
        **{**named_loss(name), **MODES.get(name, {}), **more},
    )  # fmt: skip


def assert_state_of_trainer(client, trainer, tolerance=1e-6):
    """Assert that all weights, slots and buffers are equal, and that there are no others."""
    values = trainer.state.values
    expected = values.weights | values.buffers
    for weight, slots in values.slots.items():
        expected |= {f"{weight}.{slot}": array for slot, array in slots.items()}
    assert client.state.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(client.state[name], array, tolerance, tolerance, err_msg=name)


# -- the same numbers as Trainer -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        *[("mlp", "clipped"), ("cnn", "adamw"), ("transformer", "sgd")],
        *[in_sweep("mlp", "sgd"), in_sweep("mlp", "adamw"), in_sweep("cnn", "sgd")],
        *[in_sweep("cnn", "clipped"), in_sweep("transformer", "adamw")],
        in_sweep("transformer", "clipped"),
    ],
)
def test_training_equals_the_trainer(name, optimizer, tmp_path):
    """By whole steps, and by two halves of each."""
    chosen, more = OPTIMIZERS[optimizer]
    client, (x, y) = generate_client(name, tmp_path, chosen, **more), named_data(name)
    by_halves, before = ArtifactClient(tmp_path), client.state
    losses = client.train(labeled_batches(x, y))
    halved = by_halves.train(labeled_batches(x, y), by_halves.step_by_halves)
    trainer = named_trainer(name, chosen, **more)
    trainer.fit(x, y, batch_size=ROWS, shuffle=False)
    for one, made in ((client, losses), (by_halves, halved)):
        assert_state_of_trainer(one, trainer)
        np.testing.assert_allclose(np.mean(made), trainer.history[-1]["loss"], 1e-6)
        assert made[-1] != made[0]
    assert all(np.abs(client.state[n] - before[n]).max() > 1e-4 for n in client.names("weights"))
    assert bool(client.names("buffers")) == (name == "cnn")


@pytest.mark.parametrize("name", TEXTS)
def test_evaluation_and_merged_model_equal_the_trainer(name, tmp_path):
    client, (x, y) = generate_client(name, tmp_path, "adamw"), named_data(name)
    for key in ("step", "training", "optimizer", "eval", "model"):
        model = onnx.load(tmp_path / client.manifest["files"][key])
        onnx.checker.check_model(model, full_check=True)
        assert not any(node.domain for node in model.graph.node)
        assert [o.domain for o in model.opset_import] == [""]  # standard operators only
    client.train(labeled_batches(x, y))
    trainer = named_trainer(name, "adamw").fit(x, y, batch_size=ROWS, shuffle=False)
    out = client.run("eval", {**client.state, "x": x, "label": y})
    np.testing.assert_allclose(out["loss"], trainer.evaluate(x, y)["loss"], 1e-6)
    assert out["loss"].shape == ()
    assert client.manifest["predictions"] == ["y"]
    prediction = trainer.predict(x)
    np.testing.assert_allclose(out["y"], prediction, 1e-5, 1e-6)

    save_file(client.state, tmp_path / "later.safetensors")
    merged = og.artifacts.merge_artifacts(tmp_path, tmp_path / "later.safetensors")
    (own,) = run(merged, {"x": x})
    np.testing.assert_allclose(own, prediction, 1e-5, 1e-6)
    assert operator_names(merged) == operator_names(artifact_model(name))
    first = og.artifacts.merge_artifacts(tmp_path)  # the weights at the beginning
    np.testing.assert_array_equal(run(first, {"x": x})[0], run(artifact_model(name), {"x": x})[0])


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_other_dtypes(dtype, tmp_path):
    model = artifact_model("mlp", 18)
    kind = {"float64": onnx.TensorProto.DOUBLE, "float16": onnx.TensorProto.FLOAT16}[dtype]
    model.graph.node[2].op_type = "Tanh"
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = kind
    for tensor in model.graph.initializer:
        array = numpy_helper.to_array(tensor).astype(dtype)
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    og.artifacts.generate_artifacts(model, None, None, "CrossEntropyLoss", "sgd", tmp_path)
    client, (x, y) = ArtifactClient(tmp_path), named_data("mlp")
    x = x.astype(dtype)
    wide = "float64" if dtype == "float64" else "float32"  # rates are never rounded to 16 bits
    assert client.manifest["scalars"][0]["dtype"] == wide
    client.train(labeled_batches(x, y))
    trainer = og.Trainer(model, "cross_entropy", optimizer="sgd", learning_rate=RATE)
    trainer.fit(x, y, batch_size=ROWS, shuffle=False)
    assert_state_of_trainer(client, trainer, 1e-12 if dtype == "float64" else 1e-3)


def test_dropout_draws_the_masks_of_the_trainer(tmp_path):
    client, (x, y) = generate_client("mlp", tmp_path, dropout={"r": 0.5}, seed=5), named_data("mlp")
    assert client.names("scalars") == ["minus_learning_rate", "draw"]
    client.train(labeled_batches(x, y))
    trainer = named_trainer("mlp", dropout={"r": 0.5}, seed=5)
    assert_state_of_trainer(client, trainer.fit(x, y, batch_size=ROWS, shuffle=False))
    other = named_trainer("mlp").fit(x, y, batch_size=ROWS, shuffle=False)
    assert np.abs(other.state.weights["w2"] - client.state["w2"]).max() > 1e-4


def test_sample_weights(tmp_path):
    client, (x, y) = generate_client("mlp", tmp_path, sample_weight=True), named_data("mlp")
    weight = np.random.default_rng(1).uniform(0, 3, len(x)).astype(np.float32)
    roles = {entry["name"]: entry["role"] for entry in client.manifest["inputs"]}
    assert roles == {"x": "data", "label": "label", "weight": "weight_of_rows"}
    for number, batch in enumerate(labeled_batches(x, y)):
        client.step(number, batch | {"weight": weight[number * ROWS :][:ROWS]})
    trainer = named_trainer("mlp")
    trainer.fit(x, y, sample_weight=weight, batch_size=ROWS, shuffle=False)
    assert_state_of_trainer(client, trainer)


def test_labels_that_are_nan_and_weights_of_labels(tmp_path):
    options = {"loss": "bce", "loss_options": {"ignore_nan": True, "from_logits": True}}
    client = generate_client("mlp", tmp_path, sample_weight="element", **options)
    (x, _), rng = named_data("mlp"), np.random.default_rng(1)
    trainer = named_trainer("mlp", **options)
    y = rng.integers(0, 2, (len(x), trainer.predict(x[:1]).shape[1])).astype(np.float32)
    y[rng.random(y.shape) < 0.4] = np.nan
    weight = rng.uniform(0, 3, y.shape).astype(np.float32)
    for number, batch in enumerate(labeled_batches(x, y)):
        client.step(number, batch | {"weight": weight[number * ROWS :][:ROWS]})
    trainer.fit(x, y, sample_weight=weight, batch_size=ROWS, shuffle=False)
    assert_state_of_trainer(client, trainer)
    y[0, 0] = 2
    with pytest.raises(Exception, match=r"labels in 'label'.* 0 and 1, or NaN"):
        client.step(0, {"x": x[:ROWS], "label": y[:ROWS], "weight": weight[:ROWS]})


def test_a_batch_whose_labels_are_all_ignored_changes_nothing(tmp_path):
    client, (x, _) = (
        generate_client("mlp", tmp_path, loss_options={"ignore_index": 2}),
        named_data("mlp"),
    )
    before = client.state
    assert client.step(0, {"x": x[:ROWS], "label": np.full(ROWS, 2)}) == 0
    assert all(np.array_equal(before[n], a) for n, a in client.state.items())


LABELS = {  # of three classes or elements: right ones, and wrong ones
    "cross_entropy": ({}, [0, 1, 2, -100], [-1, -2, -3, -4, 3, 2**40]),
    "ignored": ({"loss_options": {"ignore_index": -1}}, [-1, 0, 2], [-100, -2, 3]),
    "focal": ({"loss": "focal"}, [0, 1], [-1, 2, 0.5]),
    "hinge": ({"loss": "hinge"}, [-1, 1, 0], [2, -2, 0.5]),
    "poisson": ({"loss": "poisson"}, [0, 7], [-0.5, np.nan]),
}


@pytest.mark.parametrize("kind", LABELS)
def test_labels_that_a_trainer_refuses_are_refused(tmp_path, kind):
    options, right, wrong = LABELS[kind]
    client, (x, y) = generate_client("mlp", tmp_path, **options), named_data("mlp")
    if "loss" in options:  # labels are elements
        y = np.zeros((len(x), 3), np.float32)
    trainer = named_trainer("mlp", **options)
    for label in (*right, *wrong):
        own = y[:ROWS].copy()
        own.flat[3] = label
        if label in right:
            assert np.isfinite(client.step(0, {"x": x[:ROWS], "label": own}))
            trainer.fit(x[:ROWS], own)
            continue
        with pytest.raises(ValueError, match="'label'"):
            trainer.fit(x[:ROWS], own)
        for key in ("step", "training", "eval"):
            with pytest.raises(Exception, match="labels in 'label'"):
                client.run(key, {**client.state, "x": x[:ROWS], "label": own, **client.scalars(0)})


@pytest.mark.parametrize("form", [{"opset": 19, "ir_version": 9}, {"ort_format": True}], ids=str)
def test_older_runtimes_refuse_labels_too(tmp_path, form):
    client, (x, _) = generate_client("transformer", tmp_path, **form), named_data("transformer")
    client.suffix = ".ort" if "ort_format" in form else ".onnx"
    y = x[:ROWS].copy()
    client.step(0, {"x": x[:ROWS], "label": y})
    y[2, 3] = -1
    with pytest.raises(Exception, match=r"labels in 'label'.* 0 to 10"):
        client.step(1, {"x": x[:ROWS], "label": y})


def test_a_loss_inside_of_the_model(tmp_path):
    whole = og.add_loss_output(artifact_model("mlp"), "squared_error")
    og.artifacts.generate_artifacts(whole, optimizer="SGD", artifact_directory=tmp_path)
    client, (x, _) = ArtifactClient(tmp_path), named_data("mlp")
    y = np.random.default_rng(1).normal(size=(len(x), 3)).astype(np.float32)
    client.train(labeled_batches(x, y))
    trainer = og.Trainer(whole, optimizer="sgd", learning_rate=RATE)
    assert_state_of_trainer(client, trainer.fit(x, y, batch_size=ROWS, shuffle=False))


def test_adapters_train(tmp_path):
    adapted = og.add_lora(artifact_model("mlp"), ["w1"], rank=2)
    og.artifacts.generate_artifacts(adapted, None, None, "CrossEntropyLoss", "AdamW", tmp_path)
    client, (x, y) = ArtifactClient(tmp_path), named_data("mlp")
    assert all("lora" in name for name in client.names("weights"))
    client.train(labeled_batches(x, y))
    save_file(client.state, tmp_path / "checkpoint.safetensors")
    merged = og.merge_lora(og.artifacts.merge_artifacts(tmp_path))
    out = client.run("eval", {**client.state, "x": x, "label": y})
    np.testing.assert_allclose(run(merged, {"x": x})[0], out["y"], 1e-5, 1e-5)


# -- the former names ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("former", "ours"),
    [
        ("MSELoss", "squared_error"),
        ("L1Loss", "absolute_error"),
        ("BCEWithLogitsLoss", "binary_cross_entropy"),
    ],
)
def test_former_losses(former, ours, tmp_path):
    client, (x, _) = generate_client("mlp", tmp_path, loss=former), named_data("mlp")
    y = np.random.default_rng(1).integers(0, 2, (len(x), 3)).astype(np.float32)
    (f,) = run(artifact_model("mlp"), {"x": x})
    losses = {
        "MSELoss": (f - y) ** 2,
        "L1Loss": np.abs(f - y),
        "BCEWithLogitsLoss": np.logaddexp(0, f) - f * y,
    }
    out = client.run("eval", {**client.state, "x": x, "label": y})
    np.testing.assert_allclose(out["loss"], losses[former].mean(), 1e-5)


def test_former_losses_of_several_outputs(tmp_path):
    model, (x, y) = artifact_model("mlp"), named_data("mlp")
    model.graph.output.extend(onnx.parser.parse_graph("g () => (float[N,8] r) {}").output)
    losses = {"y": "CrossEntropyLoss", "r": "squared_error"}
    og.artifacts.generate_artifacts(model, None, None, losses, "SGD", tmp_path)
    client, z = ArtifactClient(tmp_path), np.ones((len(x), 8), np.float32)
    out = client.run("eval", {**client.state, "x": x, "label_y": y, "label_r": z})
    f, r = (out[name].astype(np.float64) for name in ("y", "r"))
    entropy = np.log(np.exp(f).sum(1)) - f[np.arange(len(y)), y]
    np.testing.assert_allclose(out["loss"], entropy.mean() + ((r - z) ** 2).mean(), 1e-5)
    assert client.manifest["predictions"] == ["y", "r"]


def test_the_former_adamw_adds_eps_before_the_correction(tmp_path):
    og.artifacts.generate_artifacts(
        artifact_model("mlp"), ["b2"], None, "MSELoss", "AdamW", tmp_path
    )
    client, m, v = ArtifactClient(tmp_path), 0.0, 0.0
    w = client.state["b2"].astype(np.float64)
    for number in range(5):
        g = np.array([1e-7, 1e-6, 1e-3]) * (number + 1)
        fed = {"b2_grad": g.astype(np.float32), **client.state, **client.scalars(number)}
        new = client.run("optimizer", fed)
        client.state = {name: new[f"{name}.new"] for name in client.state}
        m, v, t = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g, number + 1
        rate = RATE * np.sqrt(1 - 0.999**t) / (1 - 0.9**t)
        w = w - rate * m / (np.sqrt(v) + 1e-6)
        np.testing.assert_allclose(client.state["b2"], w, 1e-6)


def test_requires_grad_and_frozen_params(tmp_path):
    client = generate_client("mlp", tmp_path, requires_grad=["w*"], frozen_params=["w1"])
    assert client.names("weights") == ["w2"]
    assert client.state.keys() == {"w2"}


def test_without_an_optimizer_there_is_no_step(tmp_path):
    client, (x, y) = generate_client("cnn", tmp_path, None), named_data("cnn")
    assert client.manifest["files"].keys() == {"training", "eval", "checkpoint", "model"}
    assert client.names("slots") == client.names("scalars") == []
    assert not (tmp_path / "step.onnx").exists()
    out = client.run("training", {**client.state, "x": x, "label": y})
    assert {"k_grad", "mean.new", "var.new", "loss_sum", "loss_count"} <= out.keys()


def test_additional_outputs_and_prefix(tmp_path):
    names = ["hb", "y"]
    arguments = (None, None, "CrossEntropyLoss", "SGD", tmp_path, "a_")
    og.artifacts.generate_artifacts(
        artifact_model("mlp"), *arguments, additional_output_names=names
    )
    assert {path.name for path in tmp_path.iterdir()} == {
        *("a_training.json", "a_checkpoint.safetensors", "a_model.onnx", "a_step.onnx"),
        *("a_training_model.onnx", "a_eval_model.onnx", "a_optimizer_model.onnx"),
    }
    session = ort.InferenceSession(tmp_path / "a_eval_model.onnx")
    assert [y.name for y in session.get_outputs()] == ["loss", "y", "hb"]
    x, y = named_data("mlp")
    fed = load_file(tmp_path / "a_checkpoint.safetensors") | {"x": x, "label": y}
    out = session.run(["hb"], fed)[0]
    weights = initializer_arrays(artifact_model("mlp"))
    np.testing.assert_allclose(out, x @ weights["w1"] + weights["b1"], 1e-5, 1e-5)
    (own,) = run(og.artifacts.merge_artifacts(tmp_path, prefix="a_"), {"x": x})
    np.testing.assert_array_equal(own, run(artifact_model("mlp"), {"x": x})[0])
    succeed("merge", tmp_path, "--prefix", "a_", "-o", tmp_path / "merged.onnx")
    np.testing.assert_array_equal(run(tmp_path / "merged.onnx", {"x": x})[0], own)
    with pytest.raises(FileNotFoundError, match=naming("prefix", "a_training.json")):
        og.artifacts.merge_artifacts(tmp_path)


# -- the files -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp", in_sweep("cnn"), in_sweep("transformer")])
def test_older_runtimes(name, tmp_path):
    """The Gelu of the MLP exists from opset 20 on; the models state opset 23."""
    (tmp_path / "new").mkdir()
    newest = generate_client(name, tmp_path / "new", "adamw")
    og.artifacts.generate_artifacts(
        artifact_model(name, 23), optimizer="adamw", artifact_directory=tmp_path / "old", opset=19,
        ir_version=9, **named_loss(name), **MODES.get(name, {}),
    )  # fmt: skip
    client, (x, y) = ArtifactClient(tmp_path / "old"), named_data(name)
    files = [tmp_path / "old" / f for f in client.manifest["files"].values() if "onnx" in f]
    assert len(files) == 5
    for file in files:
        model = onnx.load(file)
        onnx.checker.check_model(model, full_check=True)
        assert model.ir_version == 9
        assert {(o.domain, min(o.version, 19)) for o in model.opset_import} == {
            (o.domain, o.version) for o in model.opset_import
        }
        assert not any(node.domain for node in model.graph.node)
    assert client.manifest["weights"] == newest.manifest["weights"]
    client.train(labeled_batches(x, y))
    newest.train(labeled_batches(x, y))
    for key, array in newest.state.items():
        np.testing.assert_allclose(client.state[key], array, 1e-5, 1e-5)


@pytest.mark.parametrize("name", ["cnn", in_sweep("mlp"), in_sweep("transformer")])
def test_ort_format(name, tmp_path):
    client = generate_client(name, tmp_path, "adamw", ort_format=True)
    other, (x, y) = ArtifactClient(tmp_path, ".ort"), named_data(name)
    assert client.manifest["ort_files"]["eval"] == "eval_model.ort"
    batches = list(labeled_batches(x, y))
    np.testing.assert_allclose(client.train(batches), other.train(batches), 1e-5)
    out = other.run("eval", {**other.state, "x": x, "label": y})
    expected = client.run("eval", {**client.state, "x": x, "label": y})
    np.testing.assert_allclose(out["loss"], expected["loss"], 1e-4)
    ArtifactClient(tmp_path, ".ort").train(batches[:2], client.step_by_halves)


def test_the_manifest(tmp_path):
    client = generate_client("cnn", tmp_path, "adamw", learning_rate=0.5)
    manifest, state = client.manifest, client.state
    assert manifest["format"] == 1
    assert manifest["learning_rate"] == 0.5
    rows = manifest["inputs"][0]["shape"][0]
    assert isinstance(rows, str)
    assert manifest["inputs"] == [
        {"name": "x", "dtype": "float32", "shape": [rows, 2, 6, 6], "role": "data"},
        {"name": "label", "dtype": "int64", "shape": [rows], "role": "label"},
    ]
    assert client.names("buffers") == ["mean", "var"]
    assert {s["weight"] for s in manifest["slots"]} == set(client.names("weights"))
    assert [s["name"] for s in manifest["scalars"]] == ["minus_learning_rate", "step"]
    for kind in ("weights", "slots", "buffers"):
        for entry in manifest[kind]:
            assert state[entry["name"]].shape == tuple(entry["shape"])
            assert state[entry["name"]].dtype == entry["dtype"]
    session = ort.InferenceSession(tmp_path / "step.onnx")
    kinds = ("weights", "slots", "buffers")
    names = [name for kind in kinds for name in client.names(kind)]
    assert [y.name for y in session.get_outputs()] == ["loss", *(f"{n}.new" for n in names)]
    inputs = [*names, *client.names("inputs"), *client.names("scalars")]
    assert [x.name for x in session.get_inputs()] == inputs


def test_large_frozen_weights_are_external_data(tmp_path, monkeypatch):
    """What does not fit a file of protobuf goes beside it, and is found there."""
    monkeypatch.setattr(external, "IN_MODEL", 0)
    monkeypatch.setattr(external, "SMALL", 100)
    folder = tmp_path / "files"
    for _ in range(2):  # the second replaces the first
        client = generate_client("mlp", folder, "adamw", requires_grad=["w2", "b2"])
    assert (folder / "step.onnx.1.data").exists()
    folder.rename(tmp_path / "moved")
    client, (x, y) = ArtifactClient(tmp_path / "moved"), named_data("mlp")
    client.train(labeled_batches(x, y))
    trainer = named_trainer("mlp", "adamw", train=["w2", "b2"])
    assert_state_of_trainer(client, trainer.fit(x, y, batch_size=ROWS, shuffle=False))
    save_file(client.state, tmp_path / "c.safetensors")
    og.save(
        og.artifacts.merge_artifacts(tmp_path / "moved", tmp_path / "c.safetensors"),
        tmp_path / "m.onnx",
    )
    (own,) = ort.InferenceSession(tmp_path / "m.onnx").run(None, {"x": x})
    np.testing.assert_allclose(own, trainer.predict(x), 1e-5, 1e-6)


# -- merge ---------------------------------------------------------------------------------------


def test_the_command_merges_a_folder(tmp_path):
    client, (x, y) = generate_client("cnn", tmp_path / "a", "adamw"), named_data("cnn")
    client.train(labeled_batches(x, y))
    save_file(client.state, tmp_path / "c.safetensors")
    output, options = tmp_path / "m.onnx", ["--checkpoint", tmp_path / "c.safetensors"]
    assert "wrote" in succeed("merge", tmp_path / "a", *options, "-o", output).stdout
    out = client.run("eval", {**client.state, "x": x, "label": y})
    np.testing.assert_allclose(run(onnx.load(output), {"x": x})[0], out["y"], 1e-5, 1e-6)
    own = tmp_path / "a" / "model.onnx"
    assert "model.onnx" in refusal("merge", tmp_path / "a", "-o", own, "--overwrite")
    assert "generate_artifacts" in refusal("merge", own, *options, "-o", tmp_path / "n")
    assert "no artifacts" in refusal("merge", tmp_path, "-o", tmp_path / "n.onnx")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("w1"), "no 'w1'"),
        (lambda state: state.update(other=state["w1"]), r"no tensors 'other'"),
        (lambda state: state.update(w1=state["w2"]), r"its 'w1' is float32 \(8, 3\), not"),
        (lambda state: state.update(b1=state["b1"].astype("float64")), "its 'b1' is float64"),
        (lambda state: state.update(b1=state["b1"] * np.nan), "'b1' holds NaN"),
    ],
)
def test_checkpoints_of_other_models_are_refused(change, message, mlp_folder, tmp_path):
    client = ArtifactClient(mlp_folder)
    change(client.state)
    save_file(client.state, tmp_path / "c.safetensors")
    with pytest.raises(ValueError, match=message):
        og.artifacts.merge_artifacts(mlp_folder, tmp_path / "c.safetensors")


def test_a_checkpoint_of_equal_names_but_another_backbone_is_refused(tmp_path):
    generate_client("mlp", tmp_path / "a", requires_grad=["w2"])
    other = artifact_model("mlp")
    other.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.ones((4, 8), np.float32), "w1"))
    og.artifacts.generate_artifacts(other, ["w2"], None, "CrossEntropyLoss", "SGD", tmp_path / "b")
    with pytest.raises(ValueError, match=naming("other weights", "merge it")):
        og.artifacts.merge_artifacts(tmp_path / "a", tmp_path / "b" / "checkpoint.safetensors")


def test_damaged_files_are_refused(tmp_path):
    generate_client("mlp", tmp_path)
    (tmp_path / "c.safetensors").write_bytes(b"no safetensors at all")
    with pytest.raises(ValueError, match=naming("c.safetensors", "damaged")):
        og.artifacts.merge_artifacts(tmp_path, tmp_path / "c.safetensors")
    with pytest.raises(FileNotFoundError, match=naming("none.safetensors", "checkpoint of")):
        og.artifacts.merge_artifacts(tmp_path, tmp_path / "none.safetensors")
    (tmp_path / "training.json").write_text('{"format": 2}')
    with pytest.raises(ValueError, match=naming("training.json", "format 2", "again")):
        og.artifacts.merge_artifacts(tmp_path)
    (tmp_path / "training.json").write_text("{")
    with pytest.raises(ValueError, match=naming("training.json", "damaged", "again")):
        og.artifacts.merge_artifacts(tmp_path)


def test_a_weight_larger_than_a_file_can_hold_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "LARGEST", 128)
    with pytest.raises(ValueError, match=r"the weight 'w1' has 128 bytes.*frozen_params"):
        generate_client("mlp", tmp_path)
    generate_client("mlp", tmp_path, frozen_params=["w1"])


# -- the page -----------------------------------------------------------------------------------


def test_the_code_of_the_page(tmp_path, monkeypatch):
    page = (DOCS / "devices.md").read_text()
    blocks = code_of("devices.md")
    assert len(blocks) == 3
    (tmp_path / "data").symlink_to(ROOT / "data")
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec("\n".join(blocks), names)
    losses, images, labels = (names[name] for name in ("losses", "images", "labels"))
    assert np.mean(losses[:10]) > 1.5
    assert np.mean(losses[-10:]) < 0.4
    scores = ort.InferenceSession("trained.onnx").run(None, {"image": images})[0]
    assert (scores.argmax(1) == labels).mean() > 0.85
    manifest = json.loads((tmp_path / "artifacts" / "training.json").read_text())
    for file in manifest["files"].values():
        assert f"| `{file}` |" in page


# -- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"requires_grad": ["w11"]}, "'w11'.*'w1'"),
        ({"frozen_params": ["b3"]}, "'b3'"),
        (
            {"requires_grad": ["w1", "w2"], "frozen_params": ["w1"]},
            r"'w1'.*requires_grad",
        ),
        ({"loss": "MSELos"}, "'MSELos'.*'MSELoss'"),
        ({"optimizer": "AdanW"}, "'AdanW'.*'adamw'"),
        ({"optimizer": og.optimizers.ema(og.optimizers.sgd())}, "averages"),
        ({"additional_output_names": ["hbb"]}, "'hbb'"),
        ({"prefix": "a/b"}, "prefix='a/b'"),
        ({"learning_rate": og.schedules.cosine(0.1)}, "learning_rate"),
        ({"learning_rate": -1.0}, "learning_rate.*-1.0"),
        ({"class_weight": "balanced"}, "needs labels"),
        ({"opset": 17}, "opset 18"),
        ({"ir_version": 8}, "ir_version=8: the opsets .* need IR version 9"),
        ({"batch_norm": "on"}, "batch_norm"),
        ({"acumulate": 2}, "generate_artifacts 'acumulate'"),
        ({"learning_rates": 2}, "'learning_rate'"),
    ],
)
def test_errors_leave_the_folder_as_it_was(options, message, mlp_folder):
    before = {path.name: path.read_bytes() for path in mlp_folder.iterdir()}
    with pytest.raises(ValueError, match=message):
        generate_client("mlp", mlp_folder, **options)
    assert {path.name: path.read_bytes() for path in mlp_folder.iterdir()} == before
    assert [path.name for path in mlp_folder.parent.glob("*.partial")] == []


def test_a_failure_while_writing_leaves_the_folder_as_it_was(tmp_path, monkeypatch):
    folder = tmp_path / "files"
    generate_client("mlp", folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    (folder / "training_model.ort").mkdir()  # after others have been moved
    with pytest.raises(IsADirectoryError, match=r"training_model\.ort"):
        generate_client("cnn", folder, ort_format=True)
    (folder / "training_model.ort").rmdir()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["files"]
    file = tmp_path / "file"
    file.write_text("text")
    with pytest.raises(NotADirectoryError, match=naming("file", "a folder")):
        generate_client("mlp", file)


def test_data_of_another_model_are_not_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(external, "IN_MODEL", 0)
    monkeypatch.setattr(external, "SMALL", 100)
    options = {"save_as_external_data": True, "location": "w.bin", "size_threshold": 0}
    onnx.save(artifact_model("mlp"), tmp_path / "big.onnx", **options)
    home = tmp_path / "home"
    home.mkdir()
    (home / "w.bin").write_bytes(b"of another model")
    arguments = (["w2"], None, "CrossEntropyLoss", "SGD", home)
    with pytest.raises(FileExistsError, match=naming("w.bin", "another folder")):
        og.artifacts.generate_artifacts(tmp_path / "big.onnx", *arguments)
    assert [path.name for path in home.iterdir()] == ["w.bin"]


@pytest.mark.parametrize(
    ("old", "new"),
    [("x", "minus_learning_rate"), ("w1", "label.m"), ("b1", "w1.m"), ("w1", "b1.new")],
)
def test_names_that_the_files_need(old, new, tmp_path):
    """A name that means two things is an error, or an existing result gives way."""
    model = artifact_model("mlp")
    for node in model.graph.node:
        node.input[:] = [new if name == old else name for name in node.input]
    for value in (*model.graph.input, *model.graph.initializer):
        value.name = new if value.name == old else value.name
    arguments = (model, None, None, "CrossEntropyLoss", "AdamW", tmp_path)
    if new == "label.m":
        og.artifacts.generate_artifacts(*arguments)
        assert "label.m.v" in ArtifactClient(tmp_path).names("slots")
        return
    with pytest.raises(ValueError, match=f"'{new}'"):
        og.artifacts.generate_artifacts(*arguments)


def test_results_give_way_to_the_names_of_slots(tmp_path):
    model = artifact_model("mlp")
    names = {"h": "w1.m", "hb": "step", "r": "loss", "z": "w2.new"}
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    og.artifacts.generate_artifacts(model, None, None, "CrossEntropyLoss", "AdamW", tmp_path)
    client, (x, y) = ArtifactClient(tmp_path), named_data("mlp")
    client.train(labeled_batches(x, y))
    trainer = named_trainer("mlp", FORMER_OPTIMIZERS["AdamW"])
    assert_state_of_trainer(client, trainer.fit(x, y, batch_size=ROWS, shuffle=False))


def test_an_output_called_loss_that_is_none(tmp_path):
    model = artifact_model("mlp")
    model.graph.output[0].name = model.graph.node[-1].output[0] = "loss"
    with pytest.raises(ValueError, match="output 'loss'"):
        og.artifacts.generate_artifacts(model, None, None, "CrossEntropyLoss", "SGD", tmp_path)


def test_weights_that_the_loss_does_not_reach(tmp_path):
    model = artifact_model("mlp")
    extra = onnx.parser.parse_graph(
        "g (float[N,4] x) => (float[N,8] other) { other = MatMul(x, w3) }"
    )
    model.graph.node.extend(extra.node)
    model.graph.output.extend(extra.output)
    model.graph.initializer.append(numpy_helper.from_array(np.ones((4, 8), np.float32), "w3"))
    arguments = (None, {"y": "cross_entropy"}, "SGD", tmp_path)
    with pytest.warns(UserWarning, match=r"depend on \['w3'\]") as caught:
        og.artifacts.generate_artifacts(
            model, ["w1", "w3"], *arguments, additional_output_names=["other"]
        )
    assert caught[0].filename == __file__  # where the user has called it
    client, (x, y) = ArtifactClient(tmp_path), named_data("mlp")
    assert client.names("weights") == ["w1"]
    out = client.run("eval", {**client.state, "x": x, "label": y})
    np.testing.assert_allclose(out["other"], x.sum(1, keepdims=True) * np.ones(8), 1e-4, 1e-4)
