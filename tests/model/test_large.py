"""Models whose data stay in files: made small, by a limit of zero for what a model holds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import ModelProto, numpy_helper

from onnxgrad import (
    ConvergenceError,
    DerivativeOptions,
    ModelError,
    Trainer,
    add_loss_output,
    check_gradient,
    onnx_derivative,
    partition,
    save,
)
from onnxgrad.compat import (
    OrtGradientForwardBackward,
    OrtGradientForwardBackwardOptimizer,
    OrtGradientOptimizer,
)
from onnxgrad.graph import (
    add_initializer,
    get_onnx_opset,
    get_train_initializer,
    onnx_rename_names,
    onnx_rename_weights,
    replace_initializers_into_onnx,
    select_model_inputs_outputs,
)
from onnxgrad.model import external
from onnxgrad.plot import onnx_simple_text_plot, to_dot
from tests.support.errors import naming
from tests.support.models import initializer_arrays, parse_model
from tests.support.running import run

N = 20  # so that a matrix has more bytes than what is always loaded


@pytest.fixture(autouse=True)
def none_held(monkeypatch):
    monkeypatch.setattr(external, "IN_MODEL", 0)


def large_model(opset: int = 18) -> ModelProto:
    """Return a network whose first two matrices are kept in files."""
    rng = np.random.default_rng(0)
    shapes = {"w1": (N, N), "b1": (N,), "w2": (N, N), "w3": (N, 1)}
    weights = {n: np.float32(rng.normal(size=shape)) / 4 for n, shape in shapes.items()}
    text = f"""g (float[N,{N}] X) => (float[N,1] Y) {{
        h = MatMul(X, w1)  hb = Add(h, b1)  r = Relu(hb)
        s = MatMul(r, w2)  t = Tanh(s)  Y = MatMul(t, w3) }}"""
    return parse_model(text, opset=opset, **weights)


def external_names(model: ModelProto) -> set[str]:
    """Return the initializers whose data are in a file."""
    return {t.name for t in model.graph.initializer if t.external_data}


def run_saved(model, feed, folder=None):
    """Return the outputs of a model whose data are in a folder, or that is bytes or a path."""
    if isinstance(model, ModelProto):
        save(model, folder / "run.onnx")
        model = folder / "run.onnx"
    return run(model, feed)


def gradient_feed(model, rows=7):
    """Return the inputs of a gradient of the network: what is no weight is drawn."""
    weights = initializer_arrays(large_model())
    rng = np.random.default_rng(1)
    fed = {"X": (rows, N), "Y_grad": (rows, 1)}
    return {
        x.name: weights[x.name]
        if x.name in weights
        else rng.normal(size=fed[x.name]).astype(np.float32)
        for x in model.graph.input
    }


@pytest.fixture
def other_folder(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    return tmp_path / "elsewhere"


@pytest.fixture
def path(tmp_path):
    """A path of the model, whose data nobody may change."""
    folder = tmp_path / "model"
    folder.mkdir()
    place = folder / "m.onnx"
    onnx.save(large_model(), place, save_as_external_data=True, size_threshold=0, location="m.data")
    data = folder / "m.data"
    before = data.read_bytes(), data.stat().st_mtime_ns
    yield place
    if data.exists():
        assert (data.read_bytes(), data.stat().st_mtime_ns) == before


def target_rows(rows=40):
    rng = np.random.default_rng(2)
    X = rng.normal(size=(rows, N)).astype(np.float32)
    return X, X[:, :1] * 2


# -- gradients --------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [None, [], ["w2"], ["b1"]])
def test_a_gradient_equals_that_of_the_model_in_memory(path, tmp_path, weights):
    made, expected = onnx_derivative(path, weights), onnx_derivative(large_model(), weights)
    assert external_names(made) == {"w1", "w2"} - set(
        weights or (weights is None and ("w1", "w2")) or ()
    )
    assert [x.name for x in made.graph.input] == [x.name for x in expected.graph.input]
    feed = gradient_feed(expected)
    want = run_saved(expected.SerializeToString(), feed)
    for got, y in zip(run_saved(made, feed, tmp_path), want, strict=True):
        np.testing.assert_allclose(got, y, rtol=1e-5, atol=1e-6)


def test_a_saved_gradient_refers_to_the_data_in_its_folder(path):
    saved = path.parent / "grad.onnx"
    made = onnx_derivative(path, ["w2"], path_name=saved)
    assert sorted(os.listdir(path.parent)) == ["grad.onnx", "m.data", "m.onnx"]
    assert saved.stat().st_size < 10_000
    feed = gradient_feed(made)
    want = run_saved(onnx_derivative(large_model(), ["w2"]).SerializeToString(), feed)
    for got, y in zip(run_saved(saved, feed), want, strict=True):
        np.testing.assert_allclose(got, y, rtol=1e-5, atol=1e-6)


def test_a_gradient_of_an_old_opset(tmp_path):
    old = large_model(13)
    onnx.save(old, tmp_path / "m.onnx", save_as_external_data=True, size_threshold=0)
    made, expected = (
        onnx_derivative(tmp_path / "m.onnx", ["b1"]),
        onnx_derivative(large_model(13), ["b1"]),
    )
    assert external_names(made) == {"w1", "w2"}
    feed = gradient_feed(expected)
    want = run_saved(expected.SerializeToString(), feed)
    for got, y in zip(run_saved(made, feed, tmp_path), want, strict=True):
        np.testing.assert_allclose(got, y, rtol=1e-5, atol=1e-6)


def test_data_in_constants_and_branches(tmp_path):
    text = f"""g (float[N,{N}] x, bool c) => (float[N,{N}] y) {{
        k = Constant<value = float[1] {{0.0}}>()
        w = If (c) <then_branch = a () => (float[{N},{N}] t) {{ t = Identity(v) }},
                    else_branch = b () => (float[{N},{N}] e) {{ e = Identity(k) }}>
        m = MatMul(x, k)  y = MatMul(m, w) }}"""
    model = parse_model(text)
    rng = np.random.default_rng(0)
    k, v = (numpy_helper.from_array(rng.normal(size=(N, N)).astype(np.float32), n) for n in "kv")
    model.graph.node[0].attribute[0].t.CopyFrom(k)
    model.graph.node[1].attribute[0].g.initializer.append(v)
    whole = model.SerializeToString()
    onnx.save(
        model, tmp_path / "m.onnx", save_as_external_data=True, size_threshold=0,
        convert_attribute=True,
    )  # fmt: skip
    read = select_model_inputs_outputs(tmp_path / "m.onnx")
    assert len(list(external.external_tensors(read))) == 2
    feed = {"x": rng.normal(size=(3, N)).astype(np.float32), "c": np.array(True)}
    np.testing.assert_allclose(
        run_saved(read, feed, tmp_path)[0], run_saved(whole, feed)[0], rtol=1e-5
    )
    new = {"k": np.ones((N, N), np.float32)}
    changed = run_saved(replace_initializers_into_onnx(tmp_path / "m.onnx", new), feed, tmp_path)[0]
    expected = run_saved(replace_initializers_into_onnx(whole, new).SerializeToString(), feed)[0]
    np.testing.assert_allclose(changed, expected, rtol=1e-5)


# -- training ---------------------------------------------------------------------------------


def two_weight_trainer(kind, model, **more):
    options = {"max_iter": 3, "learning_rate": 0.05, "random_state": 0, **more}
    if kind == "outside":
        return OrtGradientForwardBackwardOptimizer(model, ["b1", "w3"], **options)
    return OrtGradientOptimizer(add_loss_output(model), ["b1", "w3"], **options)


@pytest.mark.parametrize("kind", ["inside", "outside"])
def test_training_a_few_weights(path, other_folder, kind):
    X, y = target_rows()
    made, expected = (
        two_weight_trainer(kind, m).fit(X, y, X_val=X[:9], y_val=y[:9])
        for m in (path, large_model())
    )
    np.testing.assert_allclose(made.train_losses_, expected.train_losses_, rtol=1e-5)
    np.testing.assert_allclose(made.validation_losses_, expected.validation_losses_, rtol=1e-5)
    trained = made.get_trained_onnx(path)
    assert external_names(trained) == {"w1", "w2"}
    want = run_saved(expected.get_trained_onnx(large_model()).SerializeToString(), {"X": X})[0]
    np.testing.assert_allclose(run_saved(trained, {"X": X}, path.parent)[0], want, rtol=1e-5)
    for place in (path.parent / "t.onnx", other_folder / "t.onnx", path):
        save(trained, place)
        np.testing.assert_allclose(run_saved(place, {"X": X})[0], want, rtol=1e-5)
    assert sorted(os.listdir(path.parent)) == ["m.data", "m.onnx", "run.onnx", "t.onnx"]
    assert (other_folder / "m.data").read_bytes() == (path.parent / "m.data").read_bytes()


def test_training_all_weights(path):
    X, y = target_rows()
    made, expected = (
        OrtGradientOptimizer(
            add_loss_output(m), training_optimizer_name="adam", max_iter=3, random_state=0
        ).fit(X, y)
        for m in (path, large_model())
    )
    np.testing.assert_allclose(made.train_losses_, expected.train_losses_, rtol=1e-5)
    assert not external_names(made.get_trained_onnx(path))
    want = run_saved(expected.get_trained_onnx(large_model()).SerializeToString(), {"X": X})[0]
    save(made.get_trained_onnx(path), path)
    assert sorted(os.listdir(path.parent)) == ["m.data", "m.onnx", "m.onnx.1.data"]
    np.testing.assert_allclose(run_saved(path, {"X": X})[0], want, rtol=1e-5)
    again = OrtGradientForwardBackwardOptimizer(path, max_iter=1, random_state=0).fit(X, y)
    np.testing.assert_allclose(run_saved(path, {"X": X})[0], want, rtol=1e-5)
    save(again.get_trained_onnx(), path)
    assert sorted(os.listdir(path.parent)) == ["m.data", "m.onnx", "m.onnx.2.data"]


def test_a_trainer_trains_evaluates_and_saves(path, other_folder):
    X, y = target_rows()
    large, small = (
        Trainer(m, "mse", train=["w1", "b1"], learning_rate=0.01).fit(X, y, epochs=2)
        for m in (path, large_model())
    )
    for name, array in small.state.weights.items():
        np.testing.assert_allclose(large.state.weights[name], array, rtol=1e-5, atol=1e-6)
    assert large.evaluate(X, y)["loss"] == pytest.approx(small.evaluate(X, y)["loss"], rel=1e-5)
    assert external_names(large.model) == {"w2"}  # w3 is small
    large.save(other_folder / "t.onnx")
    got = run_saved(other_folder / "t.onnx", {"X": X})[0]
    np.testing.assert_allclose(got, small.predict(X), rtol=1e-4, atol=1e-5)


def test_an_estimator_predicts_goes_on_and_saves_its_graphs(path, tmp_path):
    X, y = target_rows()
    made, expected = (
        two_weight_trainer("outside", m, warm_start=True).fit(X, y).fit(X, y)
        for m in (path, large_model())
    )
    np.testing.assert_allclose(made.predict(X), expected.predict(X), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(made.losses(X, y), expected.losses(X, y), rtol=1e-4)
    saved = made.save_onnx_graph(tmp_path / "graphs")
    assert [f for f in os.listdir(tmp_path / "graphs") if f.endswith(".data")] == ["m.data"]
    np.testing.assert_allclose(
        run_saved(saved["model_onnx"], {"X": X})[0], expected.predict(X), 1e-5, 1e-6
    )
    ort.InferenceSession(saved["epoch_onnx_"])
    assert made.save_onnx_graph(bytes).keys() == saved.keys()


def test_a_model_in_memory_trains_by_files(path):
    X, y = target_rows()  # with a limit of zero, any is too large to be serialized whole
    made = two_weight_trainer("outside", large_model()).fit(X, y)
    np.testing.assert_allclose(
        made.train_losses_, two_weight_trainer("outside", path).fit(X, y).train_losses_, rtol=1e-5
    )


def test_a_failed_fit_keeps_what_was(path):
    X, y = target_rows()
    made = two_weight_trainer("inside", path).fit(X, y)
    before = made.get_trained_onnx().SerializeToString()
    made.set_params(learning_rate=1e30, warm_start=True)
    with pytest.raises(ConvergenceError):
        made.fit(X, y)
    assert external_names(onnx.load_model_from_string(before)) == {"w1", "w2"}
    assert all(np.isfinite(w).all() for w in made.trained_coef_.values())


def test_forward_and_backward(path, tmp_path):
    X, y = target_rows(5)
    results = []
    for model in (path, large_model()):
        passes = OrtGradientForwardBackward(model, ["b1"])
        one = passes.new_instance()
        b1 = numpy_helper.to_array(large_model().graph.initializer[1])
        results.append([*one.forward([X, b1], training=True), *one.backward([y])])
    for got, want in zip(*results, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    passes = OrtGradientForwardBackward(path, ["b1"])
    saved = passes.save_onnx_graph(tmp_path)
    np.testing.assert_allclose(
        run_saved(saved["_forward_onnx"], {"X": X, "b1": b1})[0], results[1][0], rtol=1e-5
    )


def test_a_torch_module(path):
    torch = pytest.importorskip("torch")
    from onnxgrad.torch import OnnxModule

    X, _ = target_rows(5)
    found = []
    for model in (path, large_model()):
        module = OnnxModule(model, ["b1"])
        module(torch.tensor(X)).sum().backward()
        found.append(next(module.parameters()).grad.numpy())
    np.testing.assert_allclose(*found, rtol=1e-5)


# -- graph tools ------------------------------------------------------------------------------


def test_graph_tools_hand_on_what_they_are_given(path, tmp_path):
    X, _ = target_rows(5)
    want = run_saved(large_model().SerializeToString(), {"X": X})[0]
    arrays = get_train_initializer(path)
    for tensor in large_model().graph.initializer:
        np.testing.assert_array_equal(arrays[tensor.name][0], numpy_helper.to_array(tensor))
    assert get_onnx_opset(path) == 18
    assert "MatMul" in onnx_simple_text_plot(path)
    assert "MatMul" in to_dot(path)
    for made in (
        select_model_inputs_outputs(path, ["Y"]),
        onnx_rename_names(path),
        onnx_rename_weights(path),
        add_initializer(path, "more", np.zeros(3)),
        replace_initializers_into_onnx(path, {"b1": arrays["b1"][0]}),
        add_loss_output(path),
        add_loss_output(select_model_inputs_outputs(path, ["Y"])),
        partition(path, ["b1"]).joint,
    ):
        assert len(external_names(made)) == 2, made
        assert external_names(
            select_model_inputs_outputs(made.SerializeToString())
        ) == external_names(made)
    renamed = onnx_rename_names(path)
    feed = {renamed.graph.input[0].name: X}
    np.testing.assert_allclose(run_saved(renamed, feed, tmp_path)[0], want, rtol=1e-5)
    assert check_gradient(path, weights=["b1"]).ok


def test_up_to_the_limit_a_model_holds_its_data(path, monkeypatch):
    monkeypatch.setattr(external, "IN_MODEL", 1 << 30)
    assert onnx_rename_names(path) == onnx_rename_names(large_model())
    held = select_model_inputs_outputs(path).SerializeToString()
    shutil.rmtree(path.parent)
    X, _ = target_rows(5)
    np.testing.assert_array_equal(
        run_saved(held, {"X": X})[0],
        run_saved(large_model().SerializeToString(), {"X": X})[0],
    )


def test_data_are_not_read(path, monkeypatch):
    real, seen = np.frombuffer, []

    def counted(buffer, *given, **more):
        if type(buffer).__name__ == "mmap":
            seen.append(len(buffer))
        return real(buffer, *given, **more)

    monkeypatch.setattr("numpy.frombuffer", counted)
    made = onnx_derivative(path, ["b1"], options=DerivativeOptions.KeepYieldOp)
    onnx_derivative(path, None)
    add_loss_output(path)
    partition(path, ["b1"])
    save(made, path.parent / "t.onnx")
    assert not seen
    assert get_train_initializer(path)["w1"][0].shape == (N, N)
    assert seen  # this is what does read


# -- files ------------------------------------------------------------------------------------


def test_saving_takes_no_name_that_is_in_use(path, other_folder):
    (other_folder / "m.data").write_text("precious")
    (other_folder / "m.onnx.1.data").write_text("precious too")
    model = onnx_derivative(path, ["b1"])
    save(model, other_folder / "g.onnx")
    save(large_model(), other_folder / "m.onnx")
    assert (other_folder / "m.data").read_text() == "precious"
    assert (other_folder / "m.onnx.1.data").read_text() == "precious too"
    save(model, other_folder / "g.onnx")  # the copy is there already
    save(model, other_folder / "h.onnx")
    assert sorted(f for f in os.listdir(other_folder) if f.endswith("data")) == [
        "m.1.data", "m.data", "m.onnx.1.data", "m.onnx.2.data",
    ]  # fmt: skip
    X, _ = target_rows(4)
    want = run_saved(large_model().SerializeToString(), {"X": X})[0]
    np.testing.assert_allclose(run_saved(other_folder / "m.onnx", {"X": X})[0], want, rtol=1e-5)


@pytest.mark.parametrize("given", ["references", "data"])
def test_a_failed_save_leaves_nothing(path, tmp_path, monkeypatch, given):
    model = onnx_derivative(path, ["b1"]) if given == "references" else large_model()
    (tmp_path / "t.onnx").write_text("precious")
    before = sorted(os.listdir(tmp_path))

    def full(model, file, arrays):
        file.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("onnxgrad.model.external.write_filled", full)
    with pytest.raises(OSError, match="No space"):
        save(model, tmp_path / "t.onnx")
    assert sorted(os.listdir(tmp_path)) == before
    assert (tmp_path / "t.onnx").read_text() == "precious"


def test_a_model_of_a_cache_of_links(path, tmp_path):
    blobs, cache = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    cache.mkdir()
    for name in ("m.onnx", "m.data"):
        shutil.copy(path.parent / name, blobs / f"{name}.hash")
        (cache / name).symlink_to(blobs / f"{name}.hash")
    X, y = target_rows()
    made = two_weight_trainer("outside", cache / "m.onnx").fit(X, y)
    expected = two_weight_trainer("outside", path).fit(X, y)
    assert made.train_losses_ == expected.train_losses_
    save(made.get_trained_onnx(), cache / "t.onnx")
    np.testing.assert_allclose(
        run_saved(cache / "t.onnx", {"X": X})[0], expected.predict(X), rtol=1e-5, atol=1e-6
    )


def test_data_outside_of_the_folder_are_refused(path):
    (path.parent / "m.data").rename(path.parent.parent / "m.data")
    (path.parent / "m.data").symlink_to(path.parent.parent / "m.data")
    with pytest.raises(ModelError, match=naming("m.data", "outside of", "beside the")):
        onnx_derivative(path)
    (path.parent / "m.data").unlink()
    model = onnx.load(path, load_external_data=False)
    for tensor in model.graph.initializer:
        tensor.external_data[0].value = "../m.data"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match=naming("m.data", "outside of", "beside the")):
        onnx_derivative(path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("offset", "-4", "at offset -4"),
        ("offset", "x", "at offset x"),
        ("length", "3", r"of length 3: its shape \[20, 20\] requires 1600 bytes: export"),
        ("offset", "1000000", "truncated"),
    ],
)
def test_wrong_places(path, key, value, message):
    model = onnx.load(path, load_external_data=False)
    for entry in model.graph.initializer[0].external_data:
        if entry.key == key:
            entry.value = value
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match=message):
        onnx_derivative(path)


def test_data_that_are_gone(path):
    made = onnx_derivative(path, ["b1"])
    trainer = two_weight_trainer("outside", path)
    (path.parent / "m.data").unlink()
    with pytest.raises(ModelError, match=naming("'m.data'", "not in")):
        trainer.fit(*target_rows())
    for door in (onnx_rename_names, lambda model: save(model, path.parent / "g.onnx")):
        with pytest.raises(ModelError, match=naming("m.data'", "not in", "model'")):
            door(made)


_REAL = """
import pathlib, sys
import numpy as np, onnxgrad

path, trained = sys.argv[1:]
ids = np.arange(0, 600_000, 20_000)
y = np.ones((30, 1), np.float32)
onnxgrad.onnx_derivative(path, ["head"], path_name=trained)
model = onnxgrad.compat.OrtGradientForwardBackwardOptimizer(
    path, ["head"], max_iter=2, random_state=0
)
model.fit(ids, y)
onnxgrad.save(model.get_trained_onnx(), trained)
# the peak since the process began; that of getrusage may be that of the process which started it
status = pathlib.Path("/proc/self/status").read_text()
print(int(status.split("VmHWM:")[1].split()[0]) * 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_more_than_two_gigabytes(tmp_path):
    path, trained = tmp_path / "m.onnx", tmp_path / "t.onnx"
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 13]>
        g (int64[N] ids) => (float[N,1] y) { e = Gather(table, ids)  y = MatMul(e, head) }""")
    table = model.graph.initializer.add(name="table", data_type=1, dims=(600_000, 1000))
    external.refer_to_file(table, "m.data", 0, 4 * 600_000 * 1000)
    with (tmp_path / "m.data").open("wb") as file:  # which has no blocks where nothing is written
        file.seek(4 * 20_000 * 1000)
        file.write(np.ones(1000, np.float32).data)
        file.truncate(4 * 600_000 * 1000)
    model.graph.initializer.append(numpy_helper.from_array(np.zeros((1000, 1), np.float32), "head"))
    path.write_bytes(model.SerializeToString())
    made = subprocess.run([sys.executable, "-c", _REAL, path, trained], capture_output=True)
    assert not made.returncode, made.stderr.decode()
    assert int(made.stdout) < 1e9
    assert sorted(os.listdir(tmp_path)) == ["m.data", "m.onnx", "t.onnx"]
    (head,) = (t for t in onnx.load(trained, load_external_data=False).graph.initializer[1:])
    assert np.ptp(numpy_helper.to_array(head)) == 0 < numpy_helper.to_array(head)[0]
    got = run_saved(trained, {"ids": np.array([0, 20_000])})[0]
    np.testing.assert_allclose(got[:, 0], [0, numpy_helper.to_array(head).sum()], rtol=1e-5)
