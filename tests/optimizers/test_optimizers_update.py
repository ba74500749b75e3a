"""Slots, groups, blocks and averages of the update; what optimizers refuse."""

from __future__ import annotations

import pickle
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnxgrad
from onnxgrad import add_loss_output, optimizers as of
from onnxgrad.compat import LearningRateSGD, OrtGradientOptimizer
from onnxgrad.errors import ConvergenceError
from onnxgrad.graph.emit import Emit
from onnxgrad.model.convert import to_proto
from onnxgrad.optimizers import Chain, Optimizer, ParamGroup, presets
from onnxgrad.optimizers.groups import WithRate
from onnxgrad.training.step import weight_groups
from onnxgrad.training.step.inputs import feed_inputs
from onnxgrad.training.step.update import build_update, weights_to_evaluate, write_update
from tests.support.errors import naming
from tests.support.models import initializer_arrays, parse_model
from tests.support.optimizer_runs import (
    RATES,
    SHAPES,
    first_slots,
    first_weights,
    fixed_gradients,
    two_product_model,
    update_session,
    weights_after_fifty_steps,
)
from tests.support.running import in_sweep, run, session_of
from tests.support.trainings import linear_model

KINDS = {name: (shape, np.float64) for name, shape in SHAPES.items()}


def update_model(optimizer: Optimizer, shapes=SHAPES, dtype=np.float64, **options):
    """Return the graph of an update, which reads weights by their names, and its groups."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 18}, name="update")
    op, pairs = Emit(graph), {}
    for name, shape in shapes.items():
        kind = ir.TensorType(ir.DataType.from_numpy(np.dtype(dtype)))
        w, g = (ir.Value(name=n, type=kind, shape=ir.Shape(shape)) for n in (name, f"{name}_grad"))
        pairs[w] = g
    grads = list(pairs.values())
    written = write_update(op, pairs, optimizer, **options)
    graph.inputs[:] = [*written.states, *grads, *feed_inputs(graph).values()]
    op.give(written.new)
    return to_proto(ir.Model(graph, ir_version=9)), written.groups


def fifty_steps(optimizer: Optimizer, dtype=np.float64, **options):
    """Return weights and slots by name after 50 steps in groups."""
    model, groups = update_model(optimizer, dtype=dtype, **options)
    running = session_of(model)
    arrays = [a for group in groups for a in group.initial(first_weights(dtype), {})]
    names = [x.name for x in running.get_inputs()]
    for t, (g, rate) in enumerate(zip(fixed_gradients(dtype), RATES, strict=True), 1):
        fed = dict(zip(names, arrays, strict=False)) | {f"{n}_grad": a for n, a in g.items()}
        fed |= {"minus_learning_rate": np.array(-rate, dtype), "step": np.array(t)}
        arrays = running.run(None, fed)
    rest, weights, slots = list(arrays), {}, {}
    for group in groups:
        own, rest = rest[: len(group.inputs)], rest[len(group.inputs) :]
        more_weights, more_slots = group.split(own)
        weights |= more_weights
        slots |= more_slots
    return weights, slots


def divide_into_small_blocks(monkeypatch, large: int, block_bytes: int) -> None:
    monkeypatch.setattr(weight_groups, "LARGE", large)
    monkeypatch.setattr(weight_groups, "SMALLEST_BLOCK", 3)
    monkeypatch.setattr(weight_groups, "BLOCK_BYTES", block_bytes)


EVERY = {
    **{name: choose() for name, choose in (presets.OPTIMIZERS | presets.WHOLE_TENSORS).items()},
    "swa": of.swa(of.adam(), start=3, every=2),
    "ema": of.ema(of.nadam()),
    "lookahead": of.lookahead(of.rprop()),
    "groups": Chain(
        (of.clip_by_global_norm(1.0), of.param_groups({"t*": of.adam()}, of.schedule_free()))
    ),
}


@pytest.mark.parametrize("name", EVERY)
def test_packed_weights_and_blocks_give_the_numbers_of_single_weights(name, monkeypatch):
    """The model of `build_update` has each weight alone."""
    optimizer = EVERY[name]
    expected, averages = weights_after_fifty_steps(optimizer, np.float64)
    packed, slots = fifty_steps(optimizer)
    for n, w in expected.items():
        np.testing.assert_allclose(packed[n], w, rtol=1e-12, atol=1e-12)
        own = optimizer.for_weight(n, w.shape)
        assert {slot: a.shape for slot, a in slots[n].items()} == {
            slot: own.slot_shape(slot, w.shape) for slot in own.slots
        }
    for n, w in weights_to_evaluate(optimizer, packed, slots, 50).items():
        np.testing.assert_allclose(w, averages[n], rtol=1e-11, atol=1e-11)
        assert optimizer.averages or (w == packed[n]).all()
    divide_into_small_blocks(monkeypatch, 7, 64)
    in_blocks, _ = fifty_steps(optimizer, packed=6, block_bytes=64)
    alone, _ = weights_after_fifty_steps(optimizer, np.float64)
    for n, w in expected.items():
        np.testing.assert_allclose(in_blocks[n], w, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(alone[n], w, rtol=1e-12, atol=1e-12)


def test_large_weights_are_scanned_in_blocks_and_small_ones_are_not():
    shapes = {"large": (1 << 10, 1 << 10), "prime": (1_048_583,), "small": (3, 4), "b": (4,)}
    model, groups = update_model(of.nadam(), shapes, np.float32)
    assert [(list(g.shapes), g.in_blocks) for g in groups] == [
        (["large"], True),
        (["prime"], False),
        (["small", "b"], False),
    ]
    assert tuple(groups[0].state.shape) == (8, 1 << 17)
    [scan] = [node for node in model.graph.node if node.op_type == "Scan"]
    ops = [node.op_type for node in scan.attribute[0].g.node]
    assert "Pow" not in ops  # what depends on numbers alone is computed once
    assert not [g.in_blocks for g in update_model(of.lamb(), shapes, np.float32)[1] if g.in_blocks]
    assert not [
        g for g in update_model(of.adam(), shapes, np.float32, block_bytes=0)[1] if g.in_blocks
    ]


@pytest.mark.parametrize("optimizer", ["adamw", "momentum"])
def test_weights_and_errors_on_several_threads(optimizer, monkeypatch):
    rng = np.random.default_rng(0)
    model = linear_model(rng.normal(0, 0.03, (1024, 1024)))
    X = rng.normal(size=(6, 1024)).astype(np.float32)
    weights, shapes = [], []
    for threads in (1, 2):
        for module in ("native", "training.run.runner", "runtime.session"):
            monkeypatch.setattr(f"onnxgrad.{module}.thread_count", lambda _, count=threads: count)
        trainer = onnxgrad.Trainer(model, "squared_error", optimizer=optimizer, learning_rate=1e-3)
        trainer.fit(X, -X, batch_size=3, epochs=2, shuffle=False)
        weights.append(trainer.state.weights["w"])
        shapes.append([tuple(group.state.shape) for group in trainer._call.loop.runner.step.groups])
        with pytest.raises(ConvergenceError, match=naming("ReduceSumSquare", "'x'")):
            trainer.fit(X * np.float32(1e30), X, batch_size=3, epochs=2, shuffle=False)
    assert weights[0].shape == (1024, 1024)
    np.testing.assert_allclose(*weights, rtol=1e-5, atol=1e-6)
    assert shapes == [[(8, 1 << 17)], [(2, 1 << 19)]]


@pytest.mark.parametrize("name", ["adam", "nadam", "swa", "muon", "groups"])
def test_blocks_of_a_trainer(name, monkeypatch):
    model = two_product_model(40)
    x, y = np.ones((4, 4)), np.zeros((4, 40))
    groups = Chain((of.clip_by_global_norm(1.0), of.param_groups({"u": of.adam()}, of.momentum())))
    optimizer = groups if name == "groups" else EVERY[name]
    options = {"max_iter": 5, "batch_size": 2, "learning_rate": LearningRateSGD(0.1)}
    options |= {"training_optimizer_name": optimizer, "random_state": 0}
    plain = OrtGradientOptimizer(add_loss_output(model), **options).fit(x, y).trained_coef_
    divide_into_small_blocks(monkeypatch, 100, 64)
    monkeypatch.setattr("onnxgrad.training.step.weight_groups.PACKED", 1)
    in_blocks = []

    def update_in_blocks(*arguments):
        in_blocks.append(arguments)
        return weight_groups.update_in_blocks(*arguments)

    monkeypatch.setattr("onnxgrad.training.step.update.update_in_blocks", update_in_blocks)
    trained = OrtGradientOptimizer(add_loss_output(model), **options).fit(x, y).trained_coef_
    assert len(in_blocks) == (name != "muon")  # u, unless it is orthogonalized
    for n, w in plain.items():
        np.testing.assert_allclose(trained[n], w, rtol=1e-12, atol=1e-12)
        assert not np.array_equal(w, initializer_arrays(model)[n])


# w0 is behind the sum: onnxruntime 1.31 rounds the scalar factor of a product to float32
RANKS = """f (double[N, 6] x) => (double[N, 3] y) {
        a = MatMul(x, t2)  b = Add(a, w1)  n = Mul(b, w0)  h = Tanh(n)
        i = Reshape(h, pairs)  c = MatMul(i, w4)  j = Reshape(c, rows)
        k = MatMul(j, t3)  y = Reshape(k, out) }"""
OF_RANK = {"w0": (), "w1": (4,), "t2": (6, 4), "t3": (1, 4, 3), "w4": (1, 2, 2, 2)}


def model_of_all_ranks() -> onnx.ModelProto:
    """Return a network with a weight of each rank from 0 to 4."""
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal(shape) for name, shape in OF_RANK.items()}
    arrays |= {"pairs": np.array([-1, 2, 1, 2])}
    arrays |= {"rows": np.array([-1, 1, 4]), "out": np.array([-1, 3])}
    return parse_model(RANKS, opset=20, **{name: np.asarray(a) for name, a in arrays.items()})


WRAPPED = {
    **EVERY,
    "adagrad with a rate that decays": of.adagrad(lr_decay=0.1),
    "ema without its bias": of.ema(of.adadelta(), 0.9, debias=True),
    "clipped lookahead": Chain((of.clip(0.1), of.lookahead(of.nadam(), 2))),
    "schedule_free of sgd": of.schedule_free(of.sgd(weight_decay=0.1)),
    "swa of muon": of.swa(of.muon(), 1),
    "clipped by weight": Chain((of.clip_by_norm(0.1), of.adamax(), of.sgd())),
}


PLAIN = set(presets.OPTIMIZERS) - {"adam", "schedule_free"}  # what differs is how they are wrapped


@pytest.mark.parametrize("name", [in_sweep(n) if n in PLAIN else n for n in WRAPPED])
def test_micro_batches_and_averages_of_weights_of_all_ranks(name, tmp_path):
    """Training is that of whole batches, and all that reads the weights gets those to evaluate."""
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((24, 6)), rng.standard_normal((24, 3))
    fit, weights = {"epochs": 2, "batch_size": 12, "validation": (x, y)}, []
    for parts in (1, 3):
        options = {"optimizer": WRAPPED[name], "accumulate": parts, "train": list(OF_RANK)}
        options |= {"clip_norm": 1.0} if name != "groups" else {}
        trainer = onnxgrad.Trainer(model_of_all_ranks(), "mse", learning_rate=0.01, **options)
        trainer.fit(x, y, **fit)
        evaluated = trainer.evaluated()
        assert {n: (type(a), a.shape) for n, a in evaluated.items()} == {
            name: (np.ndarray, shape) for name, shape in OF_RANK.items()
        }
        trainer.save(tmp_path / "m.onnx")
        for model in (trainer.model, onnx.load(tmp_path / "m.onnx")):
            (predicted,) = run(model, x=x)
            np.testing.assert_allclose(trainer.predict(x), predicted, rtol=1e-12)
            loss = ((predicted - y) ** 2).mean()
            assert trainer.evaluate(x, y)["loss"] == pytest.approx(loss, rel=1e-12)
            assert trainer.history[-1]["validation_loss"] == pytest.approx(loss, rel=1e-12)
        weights.append(trainer.state.weights | evaluated)
    for n, w in weights[0].items():
        np.testing.assert_allclose(weights[1][n], w, rtol=1e-7, atol=1e-9, err_msg=n)


LAST = 17_000  # of a weight that is too large to be packed with the others


@pytest.mark.parametrize(
    "optimizer", [of.adam(), of.schedule_free(), of.lookahead(of.rprop(), 3), of.adafactor()]
)
def test_slots_of_any_shape_survive_a_warm_start(optimizer):
    x, y = np.ones((4, 4)), np.zeros((4, LAST))
    rate = LearningRateSGD(0.1, learning_rate="constant")
    options = {"training_optimizer_name": optimizer, "batch_size": 2, "learning_rate": rate}
    model = add_loss_output(two_product_model(LAST, "float"))
    whole = OrtGradientOptimizer(model, max_iter=4, **options).fit(x, y)
    half = OrtGradientOptimizer(model, max_iter=2, warm_start=True, **options).fit(x, y).fit(x, y)
    assert len(whole.trained_coef_) == 3
    for n, array in whole.trained_coef_.items():
        np.testing.assert_array_equal(half.trained_coef_[n], array)


def test_slots_start_at_initial_values_and_are_checked():
    _, (group,) = update_model(of.ema(of.nadam()), {"w": (2, 3), "b": (3,)})
    rng = np.random.default_rng(0)
    w = {"w": rng.standard_normal((2, 3)), "b": rng.standard_normal(3)}
    state, m, _, product, average = group.initial(w, {"b": {"m": np.ones(3)}})
    np.testing.assert_array_equal(state, np.concatenate([w["w"].ravel(), w["b"]]))
    np.testing.assert_array_equal(average, state)
    np.testing.assert_array_equal(m, [0] * 6 + [1] * 3)
    assert product == 1.0
    assert product.shape == ()
    back, slots = group.split([state, m, m, product, average])
    np.testing.assert_array_equal(back["w"], w["w"])
    np.testing.assert_array_equal(slots["b"]["m"], np.ones(3))
    assert slots["w"]["mu_product"] == slots["b"]["mu_product"] == 1.0
    with pytest.raises(ValueError, match=naming("'m' of b", "(2,)", "(3,)")):
        group.initial(w, {"b": {"m": np.ones(2)}})
    with pytest.raises(ValueError, match=naming("'mu_product'", "w, b")):
        group.initial(w, {"b": {"mu_product": np.array(0.5)}})


def test_the_model_of_an_update_names_what_it_reads_and_writes():
    model = build_update({"b": ((3,), np.float32), "w": ((2, 3), np.float64)}, of.adafactor(), 20)
    onnx.checker.check_model(model, full_check=True)
    slots = ["b.v", "w.row", "w.column"]
    assert [x.name for x in model.graph.input] == [
        *("b", "w", *slots, "b_grad", "w_grad", "minus_learning_rate", "step")
    ]
    assert [y.name for y in model.graph.output] == [f"{n}.new" for n in ("b", "w", *slots)]
    assert model.opset_import[0].version == 20
    kinds = {x.name: x.type.tensor_type.elem_type for x in model.graph.input}
    assert kinds["b.v"] == onnx.TensorProto.FLOAT
    assert kinds["minus_learning_rate"] == onnx.TensorProto.DOUBLE  # that of the widest weight
    assert kinds["step"] == onnx.TensorProto.INT64


def test_the_global_norm_of_several_dtypes():
    kinds = {"a": ((2,), np.float32), "b": ((3, 2), np.float64)}
    model = build_update(kinds, Chain((of.clip_by_global_norm(0.5), of.sgd())))
    rng = np.random.default_rng(0)
    w = {n: rng.standard_normal(s).astype(d) for n, (s, d) in kinds.items()}
    g = {n: rng.standard_normal(s).astype(d) for n, (s, d) in kinds.items()}
    scalars = {"minus_learning_rate": np.array(-0.1), "step": np.array(1)}
    new = run(model, w | {f"{n}_grad": a for n, a in g.items()} | scalars)
    factor = 0.5 / (np.sqrt(sum((a.astype(float) ** 2).sum() for a in g.values())) + 1e-6)
    for n, value in zip(w, new, strict=True):
        np.testing.assert_allclose(value, w[n] - 0.1 * factor * g[n], rtol=1e-6)


def test_rprop_starts_at_the_rate_of_its_first_step():
    running, w = update_session(of.rprop(), np.float64, {"w": (3,)}), np.zeros(3)
    state = {"w": w} | first_slots(of.rprop(), {"w": w})
    for t, (rate, sizes) in enumerate([(0.1, 0.1), (0.7, 0.12), (0.01, 0.144)], 1):
        scalars = {"minus_learning_rate": np.array(-rate), "step": np.array(t)}
        new = running.run(None, state | scalars | {"w_grad": np.array([1.0, 2.0, 3.0])})
        np.testing.assert_allclose(state["w"] - new[0], np.full(3, sizes), rtol=1e-12)
        state = dict(zip(state, new, strict=True))


def test_all_optimizers_are_values_with_names():
    for name, choose in (presets.OPTIMIZERS | presets.WHOLE_TENSORS).items():
        optimizer = choose()
        assert presets.select(name) == optimizer
        assert presets.select(name.upper()) == optimizer
        assert pickle.loads(pickle.dumps(optimizer)) == optimizer
        assert len({optimizer, choose()}) == 1
        assert optimizer.elementwise == (name in presets.OPTIMIZERS)
        assert optimizer.averages == (name == "schedule_free")
    made = [of.sgd(), of.momentum(), of.nesterov(0.8), of.adam(), of.adam(0.8), of.adamw()]
    assert len(set(made)) == len(made)
    assert "0.8" in repr(made[4])
    assert presets.select("AdamOptimizer") == of.adam()
    with pytest.raises(ValueError, match=naming("'adem'", "'adam'")):
        presets.select("adem")


@pytest.mark.parametrize(
    "optimizer",
    [
        of.adamw(exclude=("*bais",)),
        of.adafactor(weight_decay=0.1, exclude=["*bais"]),
        of.muon(exclude=("*bais",)),
        of.ema(Chain((of.clip(1.0), of.lion(exclude=("*bais",))))),
        of.param_groups({"*bais": of.sgd()}, of.adam()),
        of.param_groups({"bias": ParamGroup(rate=2.0)}, of.adamw(exclude=("*bais",))),
        of.param_groups(
            {"bias": ParamGroup(of.sgd(weight_decay=0.1, exclude=("*bais",)))}, of.adam()
        ),
    ],
)
def test_a_pattern_that_matches_nothing_is_refused(optimizer):
    with pytest.raises(ValueError, match=naming("pattern", "'*bais'")):
        build_update(KINDS, optimizer)
    model = add_loss_output(two_product_model(40, bias="bias"))
    trainer = OrtGradientOptimizer(model, training_optimizer_name=optimizer)
    with pytest.raises(ValueError, match=naming("pattern", "'*bais'")):
        trainer.fit(np.ones((2, 4)), np.ones((2, 40)))


def test_excludes_of_a_default_are_about_all_weights():
    optimizer = of.param_groups({"tall": ParamGroup(rate=2.0)}, of.adamw(exclude=("bias",)))
    build_update(KINDS, optimizer)
    assert optimizer.for_weight("tall", (6, 4)) == WithRate(of.adamw(), 2.0)


def test_the_first_pattern_counts():
    optimizer = of.param_groups({"norm*": of.sgd(), "*": of.adam()})
    assert optimizer.for_weight("norm.weight", (7,)) == of.sgd()
    assert optimizer.for_weight("Norm.weight", (7,)) == of.adam()
    with pytest.raises(ValueError, match=naming("earlier", "'norm*'")):
        build_update(KINDS, of.param_groups({"*": of.adam(), "norm*": of.sgd()}))
    with pytest.raises(ValueError, match=naming("param_groups", "scale", "default")):
        build_update(KINDS, of.param_groups({"norm*": of.sgd()}))


WRONG = [  # an optimizer, and what the message must name
    (lambda: of.adamw(exclude="*bias"), ["exclude=('*bias',)"]),
    (lambda: of.adam(exclude=("*bias",)), ["weight_decay"]),
    (
        lambda: Chain((of.adam(), of.clip_by_global_norm(1.0))),
        ["ClipByGlobalNorm", "first in the chain"],
    ),
    (lambda: Chain((of.ema(of.adam()), of.sgd())), ["averages", "behind it", "argument optimizer"]),
    (lambda: of.ema(of.swa(of.adam(), 1)), ["Swa", "averages"]),
    (lambda: of.lookahead(of.schedule_free()), ["ScheduleFree", "averages"]),
    (lambda: of.ema("adam"), ["optimizer of Ema", "adam()", "'adam'"]),
    (lambda: of.ema(HasAverage()), ["slot 'average'", "Ema"]),
    (lambda: of.param_groups({"a": "adam"}), ["group", "adam()", "'adam'"]),
    (lambda: of.param_groups({"a": ParamGroup("adam", rate=0.1)}), ["adam()", "'adam'"]),
    (lambda: of.muon(other="adam"), ["adam()", "'adam'"]),
    (
        lambda: of.param_groups({"a": ParamGroup(rate=2.0)}),
        ["no optimizer", "optimizer=", "default="],
    ),
    (lambda: of.param_groups({"a": ParamGroup(of.adam(), weight_decay=0.1)}), ["weight_decay="]),
    (lambda: of.param_groups({"a": ParamGroup(Optimizer(), weight_decay=0.1)}), ["weight_decay="]),
    (
        lambda: of.param_groups({"a": Chain((of.clip_by_global_norm(1.0), of.adam()))}),
        ["ClipByGlobalNorm", "Chain"],
    ),
    (lambda: of.adam(b2=1.0), ["b2", "[0, 1)", "1.0"]),
    (lambda: of.adafactor(d=0.5), ["d must", "1", "0.5"]),
    (lambda: of.lookahead(of.adam(), every=0), ["every", "1"]),
    (lambda: of.swa(of.adam(), start=0), ["start", "1"]),
    (lambda: of.schedule_free(b1=0.0), ["b1", "0 and 1"]),
    (lambda: of.clip_by_norm(0.0), ["norm", "0"]),
    (lambda: of.clip(-1.0), ["value", "0"]),
    (lambda: of.rprop(etas=(1.2, 0.5)), ["etas", "between 0 and 1", "(1.2, 0.5)"]),
    (lambda: of.muon(adjust_lr_fn="origin"), ["adjust_lr_fn", "'original'"]),
    (lambda: of.muon(momentum=1.5), ["momentum", "1.5"]),
    (lambda: of.sgd(nesterov=True), ["nesterov=True", "momentum"]),
]


@pytest.mark.parametrize(("make", "parts"), WRONG)
def test_wrong_optimizers(make, parts):
    with pytest.raises(ValueError, match=naming(*parts)):
        make()


@dataclass(frozen=True)
class HasAverage(Optimizer):
    slots = ("average",)


@dataclass(frozen=True)
class Counted(Optimizer):
    """Claims to be elementwise, but counts the signs of all elements."""

    slots = ("count",)
    elementwise = True

    def slot_shape(self, slot, shape):
        return ()

    def update(self, op, u, slots, inputs):
        return u, {"count": slots["count"] + op.ReduceSum(op.Sign(u), keepdims=0)}


def test_a_number_that_depends_on_elements_is_refused_in_blocks():
    with pytest.raises(ValueError, match=naming("elementwise", "'count'")):
        update_model(Counted(), {"w": (1 << 10, 1 << 10)})


def test_claims_follow_the_methods():
    class Joint(Optimizer):
        def across(self, op, gradients):
            return gradients

    class Averaged(Optimizer):
        def evaluated(self, weight, slots, steps):
            return weight

    class NotJoint(Joint):
        joint = False

    assert (Joint.joint, NotJoint.joint, Optimizer.joint) == (True, False, False)
    assert (Averaged.averages, Optimizer.averages) == (True, False)
    assert Chain((Joint(), onnxgrad.optimizers.adam())).joint


def test_averages_before_they_start():
    w, slots = np.ones(2), {"average": np.zeros(2), "slow": np.full(2, 3.0)}
    assert of.ema(of.sgd()).evaluated(w, slots, 0) is w
    assert of.swa(of.sgd(), start=5).evaluated(w, slots, 4) is w
    assert of.swa(of.sgd(), start=5).evaluated(w, slots, 5) is slots["average"]
    chain = Chain((of.clip(1.0), of.lookahead(of.sgd())))
    assert chain.evaluated(w, slots, 1) is slots["slow"]
    assert chain.averages


def test_the_estimators_export_and_validate_averages():
    x, y = np.ones((4, 4)), np.zeros((4, 40))
    options = {"training_optimizer_name": of.ema(of.adam(), 0.9), "validation_every": 1}
    fitted = onnxgrad.compat.OrtGradientForwardBackwardOptimizer(
        two_product_model(40), max_iter=5, batch_size=4, **options
    ).fit(x, y, X_val=x, y_val=y)
    slots, now = (fitted.get_state(kind) for kind in ("grad", "weight"))
    exported = initializer_arrays(fitted.get_trained_onnx())
    assert {*exported} == {"w", "b", "u"}
    for name, w in exported.items():
        np.testing.assert_array_equal(w, slots[name]["average"].numpy())
        assert not np.array_equal(w, now[name].numpy())
    (predicted,) = run(fitted.get_trained_onnx(), x=x)
    np.testing.assert_allclose(fitted.predict(x), predicted, rtol=1e-12)
    assert fitted.validation_losses_[-1] == pytest.approx(-fitted.score(x, y), rel=1e-12)
