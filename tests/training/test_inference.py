"""Predictions of what a trainer keeps built: nothing of a call before may be in the next one."""

from __future__ import annotations

import copy
import pickle
import threading

import numpy as np
import onnx
import pytest

import onnxgrad as og
from tests.support.models import parse_model
from tests.support.running import in_sweep, run


def normed_convolutions() -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    shapes = {"w": (8, 2, 3, 3), "v": (16, 8, 3, 3), "u": (16, 3)}
    drawn = {name: 0.2 * rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    return parse_model(
        """f (float[N,2,9,9] x) => (float[N,3] y) {
            a = Conv<pads=[1,1,1,1]>(x, w)  b = BatchNormalization(a, scale, bias, mean, var)
            c = Relu(b)  d = Conv<pads=[1,1,1,1]>(c, v)  e = GlobalAveragePool(d)
            f = Flatten(e)  y = MatMul(f, u) }""",
        opset=20,
        scale=[1.0, 2.0] * 4,
        bias=[0.0] * 7 + [1.0],
        mean=[0.0] * 8,
        var=[1.0] * 8,
        **drawn,
    )


def image_rows(rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((rows, 2, 9, 9), np.float32), rng.integers(0, 3, rows)


def by_session(model: onnx.ModelProto, X: np.ndarray) -> np.ndarray:
    return run(model, x=X)[0]


def assert_predicts_model(trainer: og.Trainer) -> None:
    """Compare with a session of the trained model, for few and for many rows."""
    for rows in (1, 3, 200):
        X = image_rows(rows, rows)[0]
        expected = by_session(trainer.model, X)
        atol = 1e-5 * max(1.0, np.abs(expected).max())
        np.testing.assert_allclose(trainer.predict(X), expected, rtol=1e-4, atol=atol)


AVERAGE = og.optimizers.ema(og.optimizers.sgd(), decay=0.5)


@pytest.mark.parametrize(
    ("batch_norm", "optimizer"),
    [("frozen", "sgd"), ("train", AVERAGE), in_sweep("train", "sgd"), in_sweep("frozen", AVERAGE)],
)
def test_predict_follows_weights(batch_norm, optimizer):
    X, y = image_rows(40)
    trainer = og.Trainer(
        normed_convolutions(),
        "cross_entropy",
        optimizer=optimizer,
        batch_norm=batch_norm,
        learning_rate=0.01,
    )
    assert_predicts_model(trainer)
    before = trainer.predict(X)
    for _ in range(2):
        trainer.partial_fit(X, y)
        assert_predicts_model(trainer)
    assert np.abs(trainer.predict(X) - before).max() > 1e-3
    state = pickle.loads(pickle.dumps(trainer.state))
    trainer.fit(X, y, epochs=2)
    assert_predicts_model(trainer)
    trainer.state = state
    assert_predicts_model(trainer)
    trainer.state.weights = {"u": np.zeros((16, 3))}
    if optimizer == "sgd":
        assert not trainer.predict(X).any()
    trainer.state.weights["w"][:] = 0  # in place
    assert_predicts_model(trainer)
    assert_predicts_model(copy.deepcopy(trainer))
    assert_predicts_model(pickle.loads(pickle.dumps(trainer)))


def test_arguments_that_change():
    X, y = image_rows(40)
    options = {"ignore_index": 2}
    trainer = og.Trainer(normed_convolutions(), "cross_entropy", loss_options=options)
    ignoring = trainer.evaluate(X, y)["loss"]
    kept = y != 2
    alone = og.Trainer(normed_convolutions(), "cross_entropy").evaluate(X[kept], y[kept])["loss"]
    assert ignoring == pytest.approx(alone, rel=1e-5)
    options["ignore_index"] = -100  # in place
    everything = og.Trainer(normed_convolutions(), "cross_entropy").evaluate(X, y)["loss"]
    assert trainer.evaluate(X, y)["loss"] == pytest.approx(everything, rel=1e-5)
    assert everything != pytest.approx(alone, rel=1e-3)


def test_other_data_than_before():
    trainer, X = og.Trainer(normed_convolutions(), "cross_entropy"), image_rows(5)[0]
    expected = trainer.predict(X)
    np.testing.assert_allclose(trainer.predict(X.astype(np.float64)), expected, atol=1e-5)
    np.testing.assert_allclose(trainer.predict(X.tolist()), expected, atol=1e-5)
    turned = X[:, :, ::-1]  # not contiguous
    np.testing.assert_array_equal(trainer.predict(turned), trainer.predict(turned.copy()))
    for bad, message in (
        (X[:0], "row"),
        (X[:, :1], "shape"),
        (np.where(X > 2, np.nan, X), "NaN"),
        (np.where(X > 2, np.inf, X), "NaN"),
        (X.astype(str), "numbers"),
        (X.astype(complex), "numbers"),
    ):
        with pytest.raises(ValueError, match=message):
            trainer.predict(bad)
        np.testing.assert_array_equal(trainer.predict(X), expected)


def test_results_are_not_shared():
    trainer, X = og.Trainer(normed_convolutions(), "cross_entropy"), image_rows(5)[0]
    first = trainer.predict(X)
    copied = first.copy()
    trainer.predict(X + 1)
    np.testing.assert_array_equal(first, copied)
    first[:] = 0
    np.testing.assert_array_equal(trainer.predict(X), copied)


def test_predict_in_threads():
    trainer, wrong = og.Trainer(normed_convolutions(), "cross_entropy"), []
    data = {rows: image_rows(rows, rows)[0] for rows in (1, 2, 70, 300)}
    expected = {rows: by_session(trainer.model, X) for rows, X in data.items()}

    def work(rows: int) -> None:
        for _ in range(10):
            found = trainer.predict(data[rows])
            if found.shape != expected[rows].shape or not np.allclose(
                found, expected[rows], rtol=1e-4, atol=1e-4
            ):
                wrong.append(rows)

    threads = [threading.Thread(target=work, args=(rows,)) for rows in data]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_estimator_checks_other_data_than_before():
    pytest.importorskip("sklearn")
    from onnxgrad.sklearn import OnnxRegressor

    rng = np.random.default_rng(0)
    X = rng.standard_normal((60, 4))
    model = OnnxRegressor(hidden_layer_sizes=8, max_iter=2, tol=None, random_state=0).fit(
        X, X[:, 0]
    )
    for _ in range(2):
        model.partial_fit(X, X[:, 0])
        expected = run(model.to_onnx(), X=X)[0][:, 0]
        for given in (X, np.float32(X), X.tolist(), X.astype(object), np.asfortranarray(X)):
            np.testing.assert_allclose(model.predict(given), expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(model.predict(X[:1]), expected[:1], rtol=1e-5, atol=1e-6)
    for bad, message in (
        (X[:, :3], "3 features"),
        (X[0], "2D"),
        (X[None], "dim 3"),
        (X[:0], "0 sample"),
        (np.where(X > 1, np.nan, X), "NaN"),
        (np.where(X > 1, np.inf, X), "infinity"),
        (X.astype(complex), "Complex"),
    ):
        with pytest.raises(ValueError, match=message):
            model.predict(bad)


def test_estimator_fitted_to_a_table_warns_of_an_array():
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("sklearn")
    from onnxgrad.sklearn import OnnxRegressor

    X = pandas.DataFrame(np.random.default_rng(0).standard_normal((60, 2)), columns=["a", "b"])
    model = OnnxRegressor(hidden_layer_sizes=8, max_iter=2, tol=None, random_state=0).fit(X, X["a"])
    expected = model.predict(X)
    with pytest.warns(UserWarning, match="feature names"):
        np.testing.assert_array_equal(model.predict(X.to_numpy()), expected)
    with pytest.raises(ValueError, match="feature names"):
        model.predict(X[["b", "a"]])


def test_module_without_gradient_follows_weights():
    torch = pytest.importorskip("torch")
    from onnxgrad.torch import OnnxModule

    module, X = OnnxModule(normed_convolutions()), image_rows(70)[0]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    for _ in range(2):
        for rows in (1, 70):
            with torch.no_grad():
                found = module(torch.from_numpy(X[:rows])).numpy()
            expected = by_session(module.to_onnx(), X[:rows])
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
        module(torch.from_numpy(X)).square().mean().backward()
        optimizer.step()
