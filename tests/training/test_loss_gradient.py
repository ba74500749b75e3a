"""`value_and_grad`: losses and gradients of all rows, against PyTorch, and fits by L-BFGS."""

from dataclasses import replace

import numpy as np
import pytest

import onnxgrad as og
from onnxgrad.training import loss_gradient
from onnxgrad.training.run import row_parts
from tests.support.errors import naming
from tests.support.models import parse_model
from tests.support.moon import moon as moon
from tests.support.running import in_sweep
from tests.support.stacks import stack_and_trainers
from tests.support.thread_groups import run_in_threads
from tests.support.trainings import assert_close_arrays, normalized_model, two_layer_model

ROWS = 40


def class_rows(dtype=np.float32):
    rng = np.random.default_rng(3)
    return rng.normal(size=(ROWS, 4)).astype(dtype), rng.integers(0, 3, ROWS)


def float32(**arrays):
    return {name: np.asarray(a, np.float32) for name, a in arrays.items()}


def class_trainer(dtype=np.float32, **options):
    return og.Trainer(two_layer_model((4, 8, 3), dtype=dtype), "cross_entropy", **options)


def cut_into_batches(*arrays, size=7):
    return [tuple(a[i : i + size] for a in arrays) for i in range(0, len(arrays[0]), size)]


def assert_same_results(found, expected, tolerance=1e-6):
    np.testing.assert_allclose(found[0], expected[0], rtol=tolerance)
    assert found[1].keys() == expected[1].keys()
    assert_close_arrays(found[1], expected[1], rtol=tolerance, atol=tolerance)


def gradients_by_step(trainer, *data, **options):
    """Return the loss and the gradients of the first step of gradient descent on all rows."""
    before = dict(trainer.state.weights)
    trainer.fit(*data, batch_size=len(data[-1]), shuffle=False, **options)
    weights = trainer.state.weights
    return trainer.history[0]["loss"], {n: before[n] - weights[n] for n in before}


SGD = {"optimizer": "sgd", "learning_rate": 1.0}


# -- against PyTorch -------------------------------------------------------------------------------

DRAWS, CHOSEN = 400, {0, 2, 4, 6, 9, 11, 14, 15, 17, 18, 23, 24, 32, 55, 81, 328, 392}


@pytest.mark.parametrize("number", [n if n in CHOSEN else in_sweep(n) for n in range(DRAWS)])
def test_drawn_models_losses_and_data(number, tmp_path):
    torch = pytest.importorskip("torch")
    from tests.support import matrix_options as drawing
    from tests.support.matrix_witness import Witness

    options = drawing.draw_options(number)
    options = replace(options, dropout=False, shuffle=False, schedule="constant")
    rows, trainer = drawing.DrawnRows(options, 1), drawing.drawn_trainer(options, 1)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        witness, sums, counts, state = Witness(options), 0.0, 0.0, None
        for batch in rows.batches() if options.kind in drawing.BATCHED else [rows.arrays]:
            if state is None and options.carry:
                state = torch.tensor(np.float64(batch["state"]))
            y = witness.forward(witness.values, torch.tensor(np.float64(batch["x"])), state, True)
            added, weight = witness.loss(y, batch)
            sums, counts, state = sums + added, counts + weight, witness.carried(y, state)
        (sums / counts).backward()
    finally:
        torch.set_default_dtype(before)
    expected = (sums / counts).item(), {n: witness.values[n].grad for n in options.trained}
    found = trainer.value_and_grad(**rows.arguments(options.kind, tmp_path))
    assert_same_results(found, expected, 1e-9 if options.dtype == "double" else 1e-5)
    assert trainer.state.step == 0
    assert not trainer.state.buffers


def torch_gradients(model, loss):
    """Return the loss and the gradients that PyTorch gives, in float64; `loss` gets the weights."""
    torch = pytest.importorskip("torch")
    weights = {n: torch.tensor(np.float64(a), requires_grad=True) for n, a in model.items()}
    value = loss(weights, torch.nn.functional)
    value.backward()
    return value.item(), {n: np.zeros(w.shape) if w.grad is None else w.grad.numpy()
                          for n, w in weights.items()}  # fmt: skip


def torch_scores(w, X):
    import torch

    return torch.tanh(torch.tensor(np.float64(X)) @ w["w0"] + w["b0"]) @ w["w1"] + w["b1"]


def test_ignored_labels_and_class_weights_count_over_all_batches():
    torch = pytest.importorskip("torch")
    X, y = class_rows()
    y[:18] = np.where(np.arange(18) % 3, -1, y[:18])  # other counts in each batch
    y[21:28] = -1  # and none in one batch
    weights = [0.2, 1.0, 3.0]
    trainer = class_trainer(class_weight=weights, loss_options={"ignore_index": -1})
    expected = torch_gradients(trainer.state.weights, lambda w, f: f.cross_entropy(
        torch_scores(w, X), torch.tensor(y), torch.tensor(weights, dtype=torch.float64),
        ignore_index=-1))  # fmt: skip
    assert_same_results(trainer.value_and_grad(X, y), expected)
    assert_same_results(trainer.value_and_grad(cut_into_batches(X, y)), expected)


def test_outputs_with_different_counts_in_each_batch():
    """The mean of each output has its own denominator, which no batch knows."""
    torch = pytest.importorskip("torch")
    X, y = class_rows()
    y[:25] = -1
    target = X[:, :2].copy()
    target[30:, 1] = np.nan
    rng = np.random.default_rng(0)
    model = parse_model(
        """f (float[N,4] x) => (float[N,3] a, float[N,2] b) {
            h = MatMul(x, u)  a = MatMul(h, v)  b = MatMul(h, w) }""",
        **float32(u=rng.normal(size=(4, 5)), v=rng.normal(size=(5, 3)), w=rng.normal(size=(5, 2))),
    )  # fmt: skip
    losses = {
        "a": og.losses.LOSSES["cross_entropy"].with_options({"ignore_index": -1}),
        "b": og.losses.LOSSES["squared_error"].with_options({"ignore_nan": True}),
    }
    trainer = og.Trainer(model, losses, loss_weights={"b": 0.3})
    known = torch.tensor(~np.isnan(target))

    def loss(w, f):
        h = torch.tensor(np.float64(X)) @ w["u"]
        error = (h @ w["w"] - torch.tensor(np.nan_to_num(np.float64(target))))[known]
        return (
            f.cross_entropy(h @ w["v"], torch.tensor(y), ignore_index=-1) + 0.3 * (error**2).mean()
        )

    expected = torch_gradients(trainer.state.weights, loss)
    assert_same_results(trainer.value_and_grad(X, {"a": y, "b": target}), expected)
    batches = [(x, {"a": a, "b": b}) for x, a, b in cut_into_batches(X, y, target)]
    assert_same_results(trainer.value_and_grad(batches), expected)
    with pytest.raises(ValueError, match=naming("generator", "once", "list")):
        trainer.value_and_grad(iter(batches))
    with pytest.raises(ValueError, match=naming("no label")):
        trainer.value_and_grad(X, {"a": np.full(ROWS, -1), "b": target})


# -- what a step computes, whole or in parts -------------------------------------------------------

STEPS = {
    "dropout": {"dropout": {"h": 0.4}, "seed": 3},
    "mixed rows": {"mix": og.losses.mixup(alpha=0.5)},
    "recomputed": {"recompute": "all"},
    "some weights": {"train": ["w1"], "class_weight": "balanced"},
}


@pytest.mark.parametrize("options", STEPS.values(), ids=STEPS)
def test_is_the_gradient_of_the_next_step(options):
    X, y = class_rows(np.float64)
    trainer = class_trainer(np.float64, **SGD, **options)
    found = trainer.value_and_grad(X, y)
    assert_same_results(trainer.value_and_grad(X, y), found, 1e-12)
    assert_same_results(found, gradients_by_step(trainer, X, y), 1e-9)


def test_dropout_after_a_training_is_of_its_next_step():
    X, y = class_rows(np.float64)
    trainer = class_trainer(np.float64, **SGD, dropout={"h": 0.4})
    first = trainer.value_and_grad(X, y)
    before = dict(trainer.state.weights)
    trainer.partial_fit(X, y, batch_size=ROWS, shuffle=False)
    trainer.state.weights = before
    found = trainer.value_and_grad(X, y)
    assert abs(found[0] - first[0]) > 1e-3
    trainer.partial_fit(X, y, batch_size=ROWS, shuffle=False)
    gradients = {n: before[n] - w for n, w in trainer.state.weights.items()}
    assert_same_results(found, (trainer.history[1]["loss"], gradients), 1e-9)


def test_statistics_of_a_batch_are_of_all_rows_and_stay():
    X = class_rows(np.float64)[0][:, :3].astype(np.float32)
    trainer = og.Trainer(normalized_model(), "mse", batch_norm="train", train=["w", "scale"], **SGD)
    found = trainer.value_and_grad(X, X[:, :1])
    assert not trainer.state.buffers
    assert_same_results(found, gradients_by_step(trainer, X, X[:, :1]), 1e-5)


def test_large_arrays_are_computed_in_parts(monkeypatch):
    """And data on which a part would depend are not."""
    X, y = class_rows(np.float64)
    whole = class_trainer(np.float64).value_and_grad(X, y)
    monkeypatch.setattr(row_parts, "FORWARD_BYTES", 1)
    monkeypatch.setattr(row_parts, "WORK_PER_WEIGHT", 4)
    rows, compute = [], loss_gradient.RuntimeCall

    def noted(piece, *arguments):
        rows.append(piece.rows)
        return compute(piece, *arguments)

    monkeypatch.setattr(loss_gradient, "RuntimeCall", noted)
    trainer = class_trainer(np.float64)
    for _ in range(2):
        assert_same_results(trainer.value_and_grad(X, y), whole, 1e-12)
    assert sum(rows) == 2 * ROWS
    assert len(rows) >= 4
    rows.clear()
    class_trainer(np.float64, dropout={"h": 0.4}).value_and_grad(X, y)
    assert rows == [ROWS]


def loss_model(reduction, rows="N"):
    return parse_model(
        f"""f (double[{rows},4] x, double[{rows},1] label) => (double loss) {{
            p = MatMul(x, w)  d = Sub(p, label)  q = Mul(d, d)
            axes = Constant<value_ints = [0, 1]>()  loss = {reduction}<keepdims = 0>(q, axes) }}""",
        w=np.full((4, 1), 0.3),
    )


@pytest.mark.parametrize("reduction", ["ReduceMean", "ReduceSum"])
def test_a_loss_in_the_file_is_a_mean_or_a_sum_over_all_rows(reduction):
    X = class_rows(np.float64)[0]
    label = np.sin(X[:, :1])
    trainer = og.Trainer(loss_model(reduction))
    error = X @ trainer.state.weights["w"] - label
    factor = 1 if reduction == "ReduceSum" else 1 / ROWS
    expected = factor * (error**2).sum(), {"w": 2 * factor * X.T @ error}
    assert_same_results(trainer.value_and_grad(X, label), expected, 1e-12)
    assert_same_results(trainer.value_and_grad(cut_into_batches(X, label)), expected, 1e-12)
    fixed = og.Trainer(loss_model(reduction, rows=8))
    assert_same_results(fixed.value_and_grad(X, label), expected, 1e-12)


def test_a_fixed_batch_whose_rows_depend_on_each_other():
    """Each five rows are a batch by themselves, and their losses are averaged."""
    X = class_rows(np.float64)[0]
    label, w = np.sin(X[:, :2]), np.random.default_rng(0).normal(size=(4, 2))
    model = parse_model(
        """f (double[5,4] x) => (double[5,2] y) { axes = Constant<value_ints = [0]>()
            m = ReduceMean<keepdims = 1>(x, axes)  c = Sub(x, m)  y = MatMul(c, w) }""",
        w=w,
    )
    trainer = og.Trainer(model, "squared_error")
    centered = X - X.reshape(8, 5, 4).mean(axis=1).repeat(5, axis=0)
    error = centered @ w - label
    expected = (error**2).mean(), {"w": 2 * centered.T @ error / error.size}
    assert_same_results(trainer.value_and_grad(X, label), expected, 1e-12)
    assert_same_results(
        trainer.value_and_grad(cut_into_batches(X, label, size=10)), expected, 1e-12
    )
    with pytest.raises(ValueError, match=naming("5 rows", "39 rows")):
        trainer.value_and_grad(X[:39], label[:39])


def test_a_fixed_batch_of_one_row_takes_any_number_of_rows():
    X, y = class_rows()
    rng = np.random.default_rng(0)
    weights = float32(w=rng.normal(size=(4, 3)), b=rng.normal(size=3))
    text = "f (float[{0},4] x) => (float[{0},3] y) {{ h = MatMul(x, w)  y = Add(h, b) }}"
    one, free = (
        og.Trainer(parse_model(text.format(n), **weights), "cross_entropy") for n in ("1", "N")
    )
    assert_same_results(one.value_and_grad(X, y), free.value_and_grad(X, y))


# -- data, and what stays of them ------------------------------------------------------------------


def test_columns_and_classes_are_remembered():
    pandas = pytest.importorskip("pandas")
    X, y = class_rows()
    names = np.array(["ant", "bee", "cow"])[y]
    table = pandas.DataFrame(X, columns=list("abcd")).assign(kind=names, sure=1.0 + y)
    trainer = class_trainer(classes=["ant", "bee", "cow"])
    expected = class_trainer().value_and_grad(X, y, sample_weight=1.0 + y)
    found = trainer.value_and_grad(table, "kind", sample_weight="sure")
    assert_same_results(found, expected)
    turned = table[[*"dcba", "sure", "kind"]]
    assert_same_results(trainer.value_and_grad(turned, "kind", sample_weight="sure"), expected)
    np.testing.assert_array_equal(trainer.predict(turned), trainer.predict(X))
    with pytest.raises(ValueError, match=naming("a", "b", "c", "d")):
        trainer.value_and_grad(table.drop(columns="a"), "kind")


def test_weights_that_are_set_and_weights_without_a_path():
    X, y = class_rows()
    model = parse_model(
        "f (float[N,4] x) => (float[N,3] y, float[N,3] z) { y = MatMul(x, w)  z = MatMul(x, v) }",
        **float32(w=np.zeros((4, 3)), v=np.ones((4, 3))),
    )  # fmt: skip
    trainer = og.Trainer(model, {"y": "cross_entropy"})
    loss, gradients = trainer.value_and_grad(X, y)
    assert loss == pytest.approx(np.log(3), rel=1e-6)
    assert gradients["v"].shape == (4, 3)
    assert not gradients["v"].any()
    trainer.state.weights = {"w": -0.01 * gradients["w"]}
    expected = loss - 0.01 * np.square(gradients["w"]).sum()
    assert trainer.value_and_grad(X, y)[0] == pytest.approx(expected, rel=1e-4)
    assert trainer.evaluate(X, y)["loss"] == pytest.approx(expected, rel=1e-4)


def test_a_label_that_does_not_fit_is_named():
    model = parse_model(
        "f (float[N,4] x, int64[2] shape) => (float[A,B] y) { h = MatMul(x, w)"
        "  y = Reshape(h, shape) }",
        w=np.zeros((4, 2), np.float32),
    )
    trainer = og.Trainer(model, {"y": "squared_error"})
    X = {"x": class_rows()[0], "shape": np.array([ROWS, 2])}
    with pytest.raises(ValueError, match=naming("label", "(40, 3)")):
        trainer.value_and_grad([{**X, "label": np.zeros((ROWS, 3), np.float32)}])


# -- precision, devices, stacks and processes ------------------------------------------------------


@pytest.mark.parametrize("precision", ["float32", "mixed", "file"])
def test_weights_of_16_bits(precision):
    X, y = class_rows(np.float16)
    model, weights = class_trainer().model, class_trainer().state.weights
    halves = {name: w.astype(np.float16) for name, w in weights.items()}
    text = (
        "f ({0}[N,4] x) => ({0}[N,3] y) {{ a = Gemm(x, w0, b0)  h = Tanh(a)  y = Gemm(h, w1, b1) }}"
    )
    model = parse_model(text.format("float16"), **halves)
    exact = {name: w.astype(np.float32) for name, w in halves.items()}
    full = og.Trainer(parse_model(text.format("float"), **exact), "cross_entropy")
    half = og.Trainer(model, "cross_entropy", precision=precision)
    tolerance = 2e-3 if precision != "float32" else 1e-6
    for data in ((X, y), (cut_into_batches(X, y),)):
        found = half.value_and_grad(*data)
        assert_same_results(found, full.value_and_grad(X.astype(np.float32), y), tolerance)
        dtype = np.float16 if precision == "file" else np.float32
        assert {g.dtype for g in found[1].values()} == {np.dtype(dtype)}


def test_small_and_large_gradients_of_16_bits():
    """The scale of the loss keeps small gradients, and is halved for large ones."""
    X, _ = class_rows()
    text = "f (float16[N,4] x) => (float16[N,1] y) { y = MatMul(x, w) }"
    model = parse_model(text, w=np.zeros((4, 1), np.float16))
    trainer = og.Trainer(model, "squared_error", precision="mixed")
    for scale in (1e-7, 1e3):
        target = (scale * X[:, :1]).astype(np.float32)
        _, gradients = trainer.value_and_grad(X, target)
        expected = -2 * X.T @ target / ROWS
        np.testing.assert_allclose(gradients["w"], expected, rtol=0.02, atol=0.01 * scale)


def test_on_a_device(moon):
    X, y = class_rows()
    found = class_trainer(device="moon").value_and_grad(X, y)
    assert "MatMul" in moon.computed or "Gemm" in moon.computed
    assert_same_results(found, class_trainer().value_and_grad(X, y))


@pytest.mark.parametrize("options", [{}, {"dropout": {"h": 0.3}}, {"class_weight": "balanced"}])
def test_members_of_a_stack(options):
    X, y = class_rows()
    stack, trainers = stack_and_trainers(two_layer_model((4, 8, 3)), **options)
    for data in ((X, y), (cut_into_batches(X, y),)):
        losses, gradients = stack.value_and_grad(*data)
        for k, trainer in enumerate(trainers):
            own = losses[k], {n: g[k] for n, g in gradients.items()}
            assert_same_results(own, trainer.value_and_grad(*data), 1e-5)


@pytest.mark.parametrize("kind", ["arrays", "batches", "outputs", "shards"])
def test_processes_add_up_their_rows(kind, monkeypatch):
    X, y = class_rows(np.float64)
    y[:9] = -1
    data = (cut_into_batches(X, y),) if kind == "batches" else (X, y)
    options = {"loss_options": {"ignore_index": -1}, "loss": "cross_entropy"}
    model = two_layer_model((4, 8, 3), dtype=np.float64)
    if kind == "outputs":
        text = """f (double[N,4] x) => (double[N,3] a, double[N,3] b) {
            a = MatMul(x, w)  b = Mul(a, a) }"""
        model = parse_model(text, w=np.random.default_rng(0).normal(size=(4, 3)))
        ignoring = og.losses.LOSSES["cross_entropy"].with_options({"ignore_index": -1})
        options, data = (
            {"loss": {"a": ignoring, "b": "squared_error"}},
            (X, {"a": y, "b": X[:, :3]}),
        )
    alone = og.Trainer(model, parallel=False, **options).value_and_grad(*data)

    def compute(rank):
        shared = og.parallel.DataParallel(shards=kind == "shards")
        own = [a[13 * rank : 13 + 27 * rank] for a in data] if kind == "shards" else data
        return og.Trainer(model, parallel=shared, **options).value_and_grad(*own)

    for found in run_in_threads(monkeypatch, compute):
        assert_same_results(found, alone, 1e-12)


REFUSED = {
    "fixed": ({}, {}, ["parallel=False", "fixed batch"]),
    "statistics": ({"batch_norm": "train"}, {"sync_batch_norm": True}, ["parallel=False"]),
    "balanced": ({"class_weight": "balanced"}, {"shards": True}, ["class_weight", "shards"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_processes_that_cannot_add_up(name, monkeypatch):
    X, y = class_rows()
    options, shared, said = REFUSED[name]
    text = "f (float[{0},4] x) => (float[{0},3] y) {{ n = BatchNormalization(x, s, s, s, s) {1} }}"
    end = "y = MatMul(n, w)"
    if name == "fixed":
        end = "m = ReduceSum(n)  c = Sub(n, m)  y = MatMul(c, w)"
    model = parse_model(
        text.format(8 if name == "fixed" else "N", end), **float32(s=np.ones(4), w=np.ones((4, 3)))
    )

    def compute(rank):
        parallel = og.parallel.DataParallel(**shared)
        return og.Trainer(model, "cross_entropy", parallel=parallel, **options).value_and_grad(X, y)

    with pytest.raises(ValueError, match=naming(*said)):
        run_in_threads(monkeypatch, compute)


# -- fits by L-BFGS --------------------------------------------------------------------------------


def minimize(trainer, *data, **options):
    """Set the weights of a trainer to the minimum that L-BFGS of SciPy finds; return its result."""
    optimize = pytest.importorskip("scipy.optimize")
    shapes = {name: w.shape for name, w in trainer.state.weights.items()}

    def loss(vector):
        parts = np.split(vector, np.cumsum([np.prod(s, dtype=int) for s in shapes.values()])[:-1])
        trainer.state.weights = {
            n: p.reshape(s) for (n, s), p in zip(shapes.items(), parts, strict=True)
        }
        value, gradients = trainer.value_and_grad(*data)
        return value, np.concatenate([gradients[n].ravel() for n in shapes])

    start = np.concatenate([w.ravel() for w in trainer.state.weights.values()])
    found = optimize.minimize(loss, start, method="L-BFGS-B", jac=True, options=options)
    loss(found.x)
    return found


def test_logistic_regression_has_the_coefficients_of_scikit_learn():
    linear = pytest.importorskip("sklearn.linear_model")
    rng = np.random.default_rng(0)
    X = rng.normal(size=(200, 3))
    y = (X @ [1.0, -2.0, 0.5] + rng.logistic(size=200) > 0).astype(np.float64)
    model = parse_model(
        "f (double[N,3] x) => (double[N,1] y) { h = MatMul(x, w)  y = Add(h, b) }",
        w=np.zeros((3, 1)), b=np.zeros(1),
    )  # fmt: skip
    trainer = og.Trainer(model, "binary_cross_entropy")
    minimize(trainer, X, y[:, None], ftol=1e-15, gtol=1e-9)
    theirs = linear.LogisticRegression(C=np.inf, tol=1e-8).fit(X, y)
    np.testing.assert_allclose(trainer.state.weights["w"].T, theirs.coef_, rtol=1e-4)
    np.testing.assert_allclose(trainer.state.weights["b"], theirs.intercept_, rtol=1e-4)


def test_a_network_reaches_the_loss_of_lbfgs_of_pytorch():
    torch = pytest.importorskip("torch")
    X, _ = class_rows(np.float64)
    y = np.sin(X[:, :2])
    trainer = og.Trainer(two_layer_model((4, 6, 2), dtype=np.float64), "squared_error")
    w = {n: torch.tensor(a, requires_grad=True) for n, a in trainer.state.weights.items()}
    made = torch.optim.LBFGS(
        w.values(), max_iter=2000, line_search_fn="strong_wolfe", tolerance_grad=1e-9,
        tolerance_change=1e-14,
    )  # fmt: skip

    def closure():
        made.zero_grad()
        loss = ((torch_scores(w, X) - torch.tensor(y)) ** 2).mean()
        loss.backward()
        return loss

    made.step(closure)
    found = minimize(trainer, X, y, maxiter=4000, maxfun=8000, ftol=1e-15, gtol=1e-9)
    assert found.fun < 1e-3
    assert found.fun == pytest.approx(closure().item(), abs=1e-4)
    assert trainer.evaluate(X, y)["loss"] == pytest.approx(found.fun, rel=1e-9)
