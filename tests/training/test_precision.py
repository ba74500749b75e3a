"""Models of 16 bits train as their float32 copies do, and come out in their own dtypes."""

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pyarrow as pa
import pytest
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator
from pyarrow import parquet

import onnxgrad as og
from onnxgrad.model.convert import convert_precision
from onnxgrad.optimizers.presets import OPTIMIZERS
from tests.support.commands import succeed
from tests.support.errors import naming
from tests.support.exports import export_module
from tests.support.models import add_initializers, initializer_arrays, parse_model
from tests.support.running import in_sweep, run
from tests.support.trainings import assert_close_arrays

HALF, BFLOAT = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(256, 12)).astype(BFLOAT).astype(np.float32)  # exact in both kinds
Y = X[:, :3].argmax(1)

MLP = """f ({0}[N,12] x) => ({0}[N,3] y) { a = Gemm<transB=1>(x, w1, b1) h = Tanh(a)
    y = Gemm<transB=1>(h, w2, b2) }"""
SHAPES = {"w1": (16, 12), "b1": (16,), "w2": (3, 16), "b2": (3,)}
NORM = """f ({0}[N,12] x) => ({0}[N,3] y) { a = MatMul(x, w1) n = BatchNormalization(a, s, b, m, v)
    h = Relu(n) y = MatMul(h, w2) }"""
NORM_SHAPES = {"w1": (12, 16), "s": (16,), "b": (16,), "m": (16,), "v": (16,), "w2": (16, 3)}
NAMES = {HALF: "float16", BFLOAT: "bfloat16"}


def narrow_model(dtype=HALF, text=MLP, shapes=None, seed=0):
    """Return a model of 16 bits, whose weights are drawn."""
    rng, weights = np.random.default_rng(seed), {}
    for name, shape in (shapes or SHAPES).items():
        array = rng.normal(size=shape) / np.sqrt(shape[-1])
        weights[name] = (np.abs(array) + 0.5 if name in ("s", "v") else array).astype(dtype)
    return parse_model(text.replace("{0}", NAMES[dtype]), opset=20, **weights)


def float32_copy(proto):
    """Return the float32 copy of a model, whose weights are those of 16 bits."""
    return convert_precision(proto, ir.DataType.FLOAT)


def train_both(proto, X=X, y=Y, data=None, precision="auto", **options):
    """Train a model and its float32 copy on the same numbers."""
    fit = {"epochs": 3, "batch_size": 32} | (data or {})
    options = {"loss": "cross_entropy", "learning_rate": 1e-3} | options
    trainers = [
        og.Trainer(proto, **options, precision=precision),
        og.Trainer(float32_copy(proto), **options),
    ]
    return [t.fit(X, y, **fit) for t in trainers]


def assert_follows_float32(half, full, rtol=1e-5):
    """Weights and slots are those of float32, and the model has them rounded."""
    for name, w in full.state.weights.items():
        own = half.state.weights[name]
        assert own.dtype == np.float32
        np.testing.assert_allclose(own, w, rtol, 1e-6)
        for slot, value in full.state.slots[name].items():
            assert half.state.slots[name][slot].dtype == value.dtype
    stored, before = initializer_arrays(half.model), initializer_arrays(half._job.proto)
    for name, value in half.evaluated().items():
        assert stored[name].dtype == before[name].dtype
        np.testing.assert_array_equal(stored[name], value.astype(before[name].dtype))


IN_BFLOAT16 = ("adamw", "adafactor", "schedule_free")
CASES = [(name, dtype, rate) for name in OPTIMIZERS for dtype in NAMES for rate in (1e-3, 1e-5)]


@pytest.mark.parametrize(
    ("optimizer", "dtype", "rate"),
    [
        case if case[2] == 1e-3 and (case[1] == BFLOAT) == (case[0] in IN_BFLOAT16)
        else in_sweep(*case)
        for case in CASES
    ],
)  # fmt: skip
def test_every_optimizer_follows_float32(optimizer, dtype, rate):
    half, full = train_both(narrow_model(dtype), optimizer=optimizer, learning_rate=rate)
    assert_follows_float32(half, full)
    for own, other in zip(half.history, full.history, strict=True):
        assert own["loss"] == pytest.approx(other["loss"], rel=1e-4)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(20))
def test_no_seed_diverges(seed):
    for dtype in (HALF, BFLOAT):
        options = {"learning_rate": 1e-2, "seed": seed}
        assert_follows_float32(*train_both(narrow_model(dtype, seed=seed), **options), rtol=1e-4)


PAIRS = {
    "accumulate": {"accumulate": 4},
    "clip": {"clip_norm": 0.1},
    "average": {"optimizer": og.optimizers.ema(og.optimizers.adamw(), 0.9)},
    "schedule": {"learning_rate": og.schedules.cosine(1e-3)},
    "recompute": {"recompute": "all"},
    "sgd of lookahead": {"optimizer": og.optimizers.lookahead(og.optimizers.sgd(), every=5)},
}


@pytest.mark.parametrize("name", PAIRS)
def test_beside(name):
    assert_follows_float32(*train_both(narrow_model(), **PAIRS[name]))


BESIDE = {
    "weights of 4 bits": (
        lambda m, x: og.quantize(m, x, activations=None, weights="int4", block_size=16), {},
    ),
    "ranges": (lambda m, x: og.quantize(m, x), {"train_ranges": True}),
    "LoRA": (lambda m, x: og.add_lora(m, "w*", rank=2), {}),
    "DoRA": (lambda m, x: og.add_lora(m, "w*", rank=2, use_dora=True), {}),
    "LoRA beside integers": (
        lambda m, x: og.add_lora(og.Trainer(og.quantize(m, x), "cross_entropy").model, "*", rank=2),
        {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [in_sweep(n) if n == "LoRA" else n for n in BESIDE])
def test_quantized_and_adapted(name):
    """The file keeps its integers, its scales of 16 bits, and adapters of float32."""
    made, options = BESIDE[name]
    proto = made(narrow_model(), X.astype(HALF))
    half, full = train_both(proto, learning_rate=1e-2, **options)
    rtol = 1e-3 if name == "ranges" else 1e-6  # a number on the edge of two integers
    np.testing.assert_allclose(*([e["loss"] for e in t.history] for t in (half, full)), rtol)
    mine, other = initializer_arrays(half.model), initializer_arrays(full.model)
    assert mine.keys() == other.keys()
    for tensor, a in mine.items():
        b = other[tensor]
        assert a.dtype == b.dtype or (a.dtype, b.dtype) == (HALF, np.float32)
        if np.issubdtype(a.dtype, np.integer) or a.dtype == ml_dtypes.int4:
            assert np.abs(a.astype(int) - b.astype(int)).max() <= (name == "ranges")
        else:
            np.testing.assert_allclose(a, b, 2e-3, 2e-4)
    assert HALF in {a.dtype for a in mine.values()}


@pytest.mark.parametrize("form", ["frozen", "train"])
def test_batch_normalization(form):
    half, full = train_both(narrow_model(HALF, NORM, NORM_SHAPES), batch_norm=form)
    assert_follows_float32(half, full)
    if form == "train":
        np.testing.assert_allclose(half.state.buffers["m"], full.state.buffers["m"], 1e-5)
    assert {t.data_type for t in half.model.graph.initializer} == {TensorProto.FLOAT16}
    assert half.evaluate(X, Y)["loss"] == pytest.approx(full.evaluate(X, Y)["loss"], rel=1e-2)


def test_statistics_of_a_file_that_trains_in_16_bits():
    model = narrow_model(text=NORM, shapes=NORM_SHAPES)
    made = og.Trainer(model, "cross_entropy", batch_norm="train", precision="file")
    made.fit(X.astype(HALF), Y, validation=0.25, epochs=2)
    trained = made.model
    assert {a.dtype for a in initializer_arrays(trained).values()} == {HALF}
    expected = run(trained, {"x": X.astype(HALF)})[0]
    np.testing.assert_allclose(made.predict(X.astype(HALF)), expected, rtol=1e-2, atol=1e-2)


def test_validation_is_that_of_the_model_that_comes_out():
    trainer = og.Trainer(narrow_model(), "cross_entropy", learning_rate=1e-2)
    trainer.fit(X, Y, epochs=2, validation=(X, Y))
    rounded = float32_copy(trainer.model)
    fresh = og.Trainer(rounded, "cross_entropy").evaluate(X, Y)["loss"]
    assert trainer.history[-1]["validation_loss"] == pytest.approx(fresh, rel=1e-6)
    prediction = trainer.predict(X)
    assert prediction.dtype == np.float16
    (theirs,) = run(trainer.model, x=X.astype(np.float16))
    np.testing.assert_allclose(prediction, theirs, 2e-3, 2e-3)


def test_rounding_is_reported(caplog):
    with caplog.at_level("INFO", "onnxgrad"):
        trainer, full = train_both(narrow_model(), data={"epochs": 1})
    assert not full.rounding
    exact = trainer.state.weights
    differences = np.concatenate(
        [np.abs(w - w.astype(np.float16).astype(np.float32)).ravel() for w in exact.values()]
    )
    assert trainer.rounding["largest"] == differences.max()
    assert trainer.rounding["mean"] == pytest.approx(differences.mean(), rel=1e-5)
    assert sum("16 bits" in r.message for r in caplog.records) == 1


def test_small_steps_are_not_lost():
    """A thousand steps that float16 rounds away one by one move the weights as in float32."""
    half, full = train_both(
        narrow_model(), optimizer="sgd", learning_rate=1e-5, data={"epochs": 20}
    )
    before = initializer_arrays(narrow_model())["w1"].astype(np.float32)
    moved, wanted = (t.state.weights["w1"] - before for t in (half, full))
    np.testing.assert_allclose(moved, wanted, 1e-4, 1e-8)
    assert 0 < np.abs(moved).max() < 2.0**-11


def test_resumed_bit_for_bit(tmp_path):
    def trainer(*callbacks):
        return og.Trainer(narrow_model(), "cross_entropy", learning_rate=1e-3, callbacks=callbacks)

    whole = trainer().fit(X, Y, epochs=3)
    trainer(og.Checkpoint(tmp_path)).fit(X, Y, epochs=1)
    with pytest.raises(ValueError, match=naming("precision: 'float32'", "'mixed' now")):
        og.Trainer(narrow_model(), "cross_entropy", learning_rate=1e-3, precision="mixed").fit(
            X, Y, epochs=3, resume=tmp_path
        )
    resumed = trainer().fit(X, Y, epochs=3, resume=tmp_path)
    np.testing.assert_equal(resumed.state.weights, whole.state.weights)


def test_partial_fit_and_a_second_fit_keep_the_float32_weights():
    half, full = train_both(narrow_model(), learning_rate=1e-5)
    for trainer in (half, full):
        trainer.fit(X, Y, epochs=1)
        trainer.partial_fit(X[:40], Y[:40])
        trainer.predict(X)
    assert_follows_float32(half, full)


def test_members_of_a_stack():
    rates = [1e-3, 1e-2]
    stack = og.TrainerStack(narrow_model(), "cross_entropy", learning_rate=rates).fit(
        X, Y, epochs=2
    )
    for k, rate in enumerate(rates):
        one = og.Trainer(narrow_model(), "cross_entropy", learning_rate=rate).fit(X, Y, epochs=2)
        np.testing.assert_allclose(stack.state.weights["w1"][k], one.state.weights["w1"], 1e-4)
        assert {t.data_type for t in stack.model(k).graph.initializer} == {TensorProto.FLOAT16}


def test_a_state_that_is_carried():
    text = """f ({0}[N,12] x, {0}[N,3] h) => ({0}[N,3] y) { a = MatMul(x, w) b = MatMul(h, u)
        s = Add(a, b) y = Tanh(s) }"""
    proto = narrow_model(HALF, text, {"w": (12, 3), "u": (3, 3)})
    data = {"x": X, "h": np.zeros((256, 3), np.float32)}
    y = np.tanh(X[:, :3])
    options = {"loss": "squared_error", "carry": {"h": "y"}, "data": {"shuffle": False}}
    half, full = train_both(proto, data, y, **options)
    assert_follows_float32(half, full, rtol=1e-2)
    assert half.evaluate(data, y)["loss"] == pytest.approx(full.evaluate(data, y)["loss"], rel=1e-2)


def test_a_loss_inside_of_the_model():
    text = """f ({0}[N,12] x, {0}[N,3] target) => ({0} loss) { p = MatMul(x, w) d = Sub(p, target)
        q = Mul(d, d) loss = ReduceMean<keepdims=0>(q) }"""
    proto = narrow_model(HALF, text, {"w": (12, 3)})
    data = {"x": X, "target": X[:, :3]}
    assert_follows_float32(*train_both(proto, data, None, loss=None))
    mixed, full = train_both(proto, data, None, loss=None, precision="mixed")
    np.testing.assert_allclose(mixed.state.weights["w"], full.state.weights["w"], 1e-2, 1e-3)


def test_a_loss_model_and_a_teacher_of_16_bits():
    square = """f ({0}[N,3] y, {0}[N,3] target) => ({0}[N] loss) <int64[1] axis = {1}> {
        d = Sub(y, target)  loss = ReduceSumSquare<keepdims=0>(d, axis) }"""
    loss = narrow_model(HALF, square, {"unused": (1,)})
    data = {"x": X, "target": X[:, :3]}
    half = og.Trainer(narrow_model(), og.losses.LossModel(loss)).fit(data, epochs=2)
    full = og.Trainer(float32_copy(narrow_model()), og.losses.LossModel(float32_copy(loss))).fit(
        data, epochs=2
    )
    assert_follows_float32(half, full)
    taught = [
        og.Trainer(m, og.losses.distillation(t, "cross_entropy")).fit(X, Y, epochs=2)
        for m, t in (
            (narrow_model(), narrow_model(seed=1)),
            (float32_copy(narrow_model()), float32_copy(narrow_model(seed=1))),
        )
    ]
    assert_follows_float32(*taught, rtol=1e-2)


FORMS = {
    "inputs and outputs of float32": {"keep_io_types": True},
    "all of float16": {},
    "blocked operators": {"keep_io_types": True, "op_block_list": ["Tanh"]},
}


@pytest.mark.parametrize("form", FORMS)
def test_converted_models(form):
    from onnxruntime.transformers.float16 import convert_float_to_float16

    source = float32_copy(narrow_model())
    proto = convert_float_to_float16(source, **FORMS[form])
    half = og.Trainer(proto, "cross_entropy", learning_rate=1e-3)
    names = {row.name for row in og.trainable(source) if row.trains}
    assert set(half.trained) == names
    half.fit(X, Y, epochs=3)
    full = og.Trainer(source, "cross_entropy", learning_rate=1e-3).fit(X, Y, epochs=3)
    assert_follows_float32(half, full)
    result = half.model
    onnx.checker.check_model(result, full_check=True)
    kinds = (sorted(n.op_type for n in m.graph.node) for m in (result, proto))
    assert next(kinds) == next(kinds)


def test_an_export_of_a_module_of_halves():
    torch = pytest.importorskip("torch")
    pytest.importorskip("onnxscript")
    torch.manual_seed(0)
    layers = torch.nn.LayerNorm(16), torch.nn.GELU(), torch.nn.Linear(16, 3)
    net = torch.nn.Sequential(torch.nn.Linear(12, 16), *layers).half()
    rows = {"input": {0: torch.export.Dim("rows")}}
    example = torch.from_numpy(X[:4]).half()
    model = export_module(net, (example,), dynamo=True, dynamic_shapes=rows)
    half = og.Trainer(model, "cross_entropy", optimizer="sgd", learning_rate=0.1)
    half.fit(X, Y, epochs=2, batch_size=32, shuffle=False)
    net = net.float()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        for rows in np.split(np.arange(256), 8):
            optimizer.zero_grad()
            logits = net(torch.from_numpy(X[rows]))
            torch.nn.functional.cross_entropy(logits, torch.from_numpy(Y[rows])).backward()
            optimizer.step()
    theirs = {name: p.detach().numpy() for name, p in net.named_parameters()}
    assert set(theirs) == set(half.state.weights)
    assert_close_arrays(half.state.weights, theirs, 1e-3, 1e-4)


def test_caches_of_16_bits_are_filled():
    """Their sizes are those of what they grow to, which is computed in float32."""
    text = """f (int64[N,T] input_ids, float16[N,2,P,4] past_0)
        => (float16[N,T,7] logits, float16[N,2,Q,4] present_0) {
        e = Gather(table, input_ids) r = Reshape(e, parts) k = Transpose<perm = [0, 2, 1, 3]>(r)
        present_0 = Concat<axis = 2>(past_0, k)
        t = Transpose<perm = [0, 2, 1, 3]>(present_0) f = Reshape(t, whole)
        logits = MatMul(f, head) }"""
    proto = narrow_model(HALF, text, {"table": (7, 8), "head": (8, 7)})
    add_initializers(proto, {"parts": [0, 0, 2, 4], "whole": [0, -1, 8]})
    for axis in (1, 3):
        proto.graph.input[1].type.tensor_type.shape.dim[axis].ClearField("dim_value")
    ids = np.arange(24).reshape(8, 3) % 7
    half, full = train_both(proto, ids, None, loss="causal_lm")
    assert_follows_float32(half, full)


def test_float64_stays():
    proto = convert_precision(float32_copy(narrow_model()), ir.DataType.DOUBLE)
    trainer = og.Trainer(proto, "cross_entropy").fit(X.astype(np.float64), Y)
    assert trainer.precision == "file"
    assert {w.dtype for w in trainer.state.weights.values()} == {np.dtype(np.float64)}


def test_mixed_follows_float32():
    mixed, full = train_both(narrow_model(), precision="mixed", optimizer="sgd", learning_rate=0.1)
    assert_follows_float32(mixed, full, rtol=2e-2)
    assert mixed.history[-1]["loss_scale"] == 2**15
    assert mixed.history[-1]["skipped_steps"] == 0
    assert "loss_scale" not in full.history[-1]


@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_step_whose_gradients_are_not_finite_is_skipped(accumulate):
    """It changes nothing but the scale: the others give what they give without it."""
    text = "f ({0}[N,12] x) => ({0}[N,3] y) { y = MatMul(x, w) }"
    proto, x, y = narrow_model(HALF, text, {"w": (12, 3)}), X.copy(), X[:, :3].copy()
    x[32:64], y[32:64] = 6e4, 1e15  # products of these overflow, but not the loss
    options = {"optimizer": "adam", "accumulate": accumulate, "learning_rate": 1e-2}

    def trained(x, y, **more):
        trainer = og.Trainer(proto, "squared_error", precision="mixed", **options)
        return trainer.fit(x, y, shuffle=False, epochs=2, **more)

    others = np.r_[:32, 64:256]
    skipping, without = trained(x, y), trained(x[others], y[others])
    assert_follows_float32(skipping, without, rtol=1e-6)
    assert skipping.state.step == 16
    assert [entry["skipped_steps"] for entry in skipping.history] == [1, 2]
    assert [entry["loss_scale"] for entry in skipping.history] == [2**14, 2**13]
    assert np.isfinite(skipping.history[-1]["loss"])


def test_the_loss_scale_is_part_of_the_state(tmp_path):
    y = X[:, :3].copy()
    y[32:64] = 1e15
    text = "f ({0}[N,12] x) => ({0}[N,3] y) { y = MatMul(x, w) }"
    x = X.copy()
    x[32:64] = 6e4
    data = {"shuffle": False, "batch_size": 32}

    def trainer(*callbacks):
        proto = narrow_model(HALF, text, {"w": (12, 3)})
        return og.Trainer(proto, "squared_error", precision="mixed", callbacks=callbacks)

    whole = trainer().fit(x, y, epochs=3, **data)
    trainer(og.Checkpoint(tmp_path)).fit(x, y, epochs=1, **data)
    resumed = trainer().fit(x, y, epochs=3, resume=tmp_path, **data)
    assert resumed.history == whole.history
    assert whole.history[-1]["skipped_steps"] == 3


def test_each_member_has_a_loss_scale():
    options = {"precision": "mixed", "learning_rate": [1e-3, 1e-2]}
    stack = og.TrainerStack(narrow_model(), "cross_entropy", **options).fit(X, Y, epochs=2)
    assert stack.history[-1]["loss_scale"].shape == (2,)
    one = og.Trainer(narrow_model(), "cross_entropy", learning_rate=1e-2, precision="mixed")
    one.fit(X, Y, epochs=2)
    np.testing.assert_allclose(stack.state.weights["w1"][1], one.state.weights["w1"], 1e-2, 1e-3)


def test_numbers_that_the_file_cannot_hold_are_refused(tmp_path):
    trainer = og.Trainer(narrow_model(), "cross_entropy", learning_rate=1e-3).fit(X, Y)
    large = trainer.state.weights["w1"].copy()
    large[0, 0] = 1e5
    trainer.state.weights = {"w1": large}
    path = tmp_path / "m.onnx"
    path.write_bytes(b"before")
    for use in (lambda: trainer.model, lambda: trainer.save(path)):
        with pytest.raises(ValueError, match=naming("'w1'", "65504")):
            use()
    assert path.read_bytes() == b"before"


def test_file_warns_and_keeps_16_bits():
    trainer = og.Trainer(narrow_model(), "cross_entropy", optimizer="sgd", precision="file")
    with pytest.warns(UserWarning, match=naming("float16", "precision='auto'")):
        trainer.fit(X, Y)
    assert trainer.state.weights["w1"].dtype == np.float16


def test_refused():
    with pytest.raises(ValueError, match=naming("precision='mixed'", "16 bits")):
        og.Trainer(float32_copy(narrow_model()), "cross_entropy", precision="mixed")
    with pytest.raises(ValueError, match=naming("'half'", "'auto'")):
        og.Trainer(narrow_model(), "cross_entropy", precision="half")
    for precision in ("mixed", "file"):
        refusal = naming(f"precision='{precision}'", "bfloat16", "precision='float32'")
        for build, more in ((og.Trainer, {}), (og.TrainerStack, {"members": 2})):
            with pytest.raises(ValueError, match=refusal):
                build(narrow_model(BFLOAT), "cross_entropy", precision=precision, **more)


def test_shell_python_and_estimator_agree(tmp_path):
    pytest.importorskip("sklearn")
    onnx.save(narrow_model(), tmp_path / "m.onnx")
    table = {f"x_{i:02}": X[:, i] for i in range(12)} | {"label": Y}
    parquet.write_table(pa.table(table), tmp_path / "d.parquet")
    arguments = ["train", tmp_path / "m.onnx", tmp_path / "d.parquet", "--loss", "cross_entropy"]
    arguments += ["--optimizer", "adamw", "--learning-rate", "1e-3", "--target", "label"]
    arguments += ["--epochs", "2", "--no-shuffle"]
    arguments += ["--validation", "0", "--output", tmp_path / "out.onnx"]
    succeed(*arguments, "--batch-size", "64")
    trainer = og.Trainer(narrow_model(), "cross_entropy").fit(
        X, Y, epochs=2, batch_size=64, shuffle=False
    )
    ours = initializer_arrays(trainer.model)
    estimator = og.OnnxClassifier(
        narrow_model(), optimizer="adamw", max_iter=2, batch_size=64, shuffle=False, tol=None
    ).fit(X, Y)
    for proto in (onnx.load(tmp_path / "out.onnx"), estimator.to_onnx()):
        np.testing.assert_equal(initializer_arrays(proto), ours)


@pytest.mark.parametrize(
    "scales", ["s", "Constant<value_floats=[1.0, 1.0, 2.0, 2.0]>()", "Mul(s, s)"]
)
def test_scales_of_a_resize_stay_float32(scales):
    """The standard allows them no other dtype, also where nodes compute them."""
    read = "v = Identity(s)" if scales == "s" else f"v = {scales}"
    text = f"f (float[1,1,2,2] x) => (float[1,1,H,W] y) {{ {read} y = Resize(x, , v) }}"
    proto = parse_model(text, opset=20, s=[1.0, 1.0, 1.5, 1.5])
    converted = convert_precision(proto, ir.DataType.DOUBLE)
    onnx.checker.check_model(converted, full_check=True)
    x = RNG.normal(size=(1, 1, 2, 2))
    [y] = ReferenceEvaluator(converted).run(None, {"x": x})
    [expected] = ReferenceEvaluator(proto).run(None, {"x": x.astype(np.float32)})
    assert y.dtype == np.float64
    np.testing.assert_allclose(y, expected, rtol=1e-6)
