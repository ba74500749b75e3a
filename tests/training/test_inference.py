"""Predictions of what a trainer keeps built: nothing of a call before may be in the next one."""

from __future__ import annotations

import copy
import pickle
import threading

import numpy as np
import onnx
import pytest

import onnxgrad as og
from tests.support.running import run

_CONV = """
    <ir_version: 9, opset_import: ["": 20]>
    f (float[N,2,9,9] x) => (float[N,3] y)
    <float[8] scale = {1,2,1,2,1,2,1,2}, float[8] bias = {0,0,0,0,0,0,0,1},
     float[8] mean = {0,0,0,0,0,0,0,0}, float[8] var = {1,1,1,1,1,1,1,1}>
    {
        a = Conv<pads=[1,1,1,1]>(x, w)
        b = BatchNormalization(a, scale, bias, mean, var)
        c = Relu(b)
        d = Conv<pads=[1,1,1,1]>(c, v)
        e = GlobalAveragePool(d)
        f = Flatten(e)
        y = MatMul(f, u)
    }"""


def conv() -> onnx.ModelProto:
    proto, rng = onnx.parser.parse_model(_CONV), np.random.default_rng(0)
    for name, shape in {"w": (8, 2, 3, 3), "v": (16, 8, 3, 3), "u": (16, 3)}.items():
        array = 0.2 * rng.standard_normal(shape, np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return proto


def images(rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((rows, 2, 9, 9), np.float32), rng.integers(0, 3, rows)


def by_session(model: onnx.ModelProto, X: np.ndarray) -> np.ndarray:
    return run(model, x=X)[0]


def agrees(trainer: og.Trainer) -> None:
    """Compare with a session of the trained model, for few and for many rows."""
    for rows in (1, 3, 300):
        X = images(rows, rows)[0]
        expected = by_session(trainer.model, X)
        atol = 1e-5 * max(1.0, np.abs(expected).max())
        np.testing.assert_allclose(trainer.predict(X), expected, rtol=1e-4, atol=atol)


@pytest.mark.parametrize("batch_norm", ["frozen", "train"])
@pytest.mark.parametrize("optimizer", ["sgd", og.ema(og.sgd(), decay=0.5)])
def test_predict_follows_weights(batch_norm, optimizer):
    X, y = images(40)
    trainer = og.Trainer(
        conv(), "cross_entropy", optimizer=optimizer, batch_norm=batch_norm, learning_rate=0.01
    )
    agrees(trainer)
    before = trainer.predict(X)
    for _ in range(2):
        trainer.partial_fit(X, y)
        agrees(trainer)
    assert np.abs(trainer.predict(X) - before).max() > 1e-3
    state = pickle.loads(pickle.dumps(trainer.state))
    trainer.fit(X, y, epochs=2)
    agrees(trainer)
    trainer.state = state
    agrees(trainer)
    trainer.state.weights = {"u": np.zeros((16, 3))}
    if optimizer == "sgd":
        assert not trainer.predict(X).any()
    trainer.state.weights["w"][:] = 0  # in place
    agrees(trainer)
    agrees(copy.deepcopy(trainer))
    agrees(pickle.loads(pickle.dumps(trainer)))


def test_arguments_that_change():
    X, y = images(40)
    trainer = og.Trainer(conv(), "cross_entropy", loss_options={"ignore_index": 2})
    ignoring = trainer.evaluate(X, y)["loss"]
    kept = y != 2
    alone = og.Trainer(conv(), "cross_entropy").evaluate(X[kept], y[kept])["loss"]
    assert ignoring == pytest.approx(alone, rel=1e-5)
    trainer.loss_options["ignore_index"] = -100  # in place
    everything = og.Trainer(conv(), "cross_entropy").evaluate(X, y)["loss"]
    assert trainer.evaluate(X, y)["loss"] == pytest.approx(everything, rel=1e-5)
    assert everything != pytest.approx(alone, rel=1e-3)
    trainer.optimizer = og.ema(og.sgd(), decay=0.5)
    trainer.partial_fit(X, y).partial_fit(X, y)
    agrees(trainer)


def test_other_data_than_before():
    trainer, X = og.Trainer(conv(), "cross_entropy"), images(5)[0]
    expected = trainer.predict(X)
    np.testing.assert_allclose(trainer.predict(X.astype(np.float64)), expected, atol=1e-5)
    np.testing.assert_allclose(trainer.predict(X.tolist()), expected, atol=1e-5)
    turned = X[:, :, ::-1]  # not contiguous
    np.testing.assert_array_equal(trainer.predict(turned), trainer.predict(turned.copy()))
    for bad, message in (
        (X[:0], "it has no row"),
        (X[:, :1], "must have shape"),
        (np.where(X > 2, np.nan, X), "NaN or infinity in"),
        (np.where(X > 2, np.inf, X), "NaN or infinity in"),
        (X.astype(str), "must hold numbers"),
        (X.astype(complex), "must hold numbers"),
    ):
        with pytest.raises(ValueError, match=message):
            trainer.predict(bad)
        np.testing.assert_array_equal(trainer.predict(X), expected)


def test_results_are_not_shared():
    trainer, X = og.Trainer(conv(), "cross_entropy"), images(5)[0]
    first = trainer.predict(X)
    copied = first.copy()
    trainer.predict(X + 1)
    np.testing.assert_array_equal(first, copied)
    first[:] = 0
    np.testing.assert_array_equal(trainer.predict(X), copied)


def test_predict_in_threads():
    trainer, wrong = og.Trainer(conv(), "cross_entropy"), []
    data = {rows: images(rows, rows)[0] for rows in (1, 2, 70, 300)}
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
        (X[:, :3], "X has 3 features"),
        (X[0], "Expected 2D array"),
        (X[None], "Found array with dim 3"),
        (X[:0], "Found array with 0 sample"),
        (np.where(X > 1, np.nan, X), "Input X contains NaN"),
        (np.where(X > 1, np.inf, X), "Input X contains infinity"),
        (X.astype(complex), "Complex data not supported"),
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
    with pytest.warns(UserWarning, match="does not have valid feature names"):
        np.testing.assert_array_equal(model.predict(X.to_numpy()), expected)
    with pytest.raises(ValueError, match="feature names"):
        model.predict(X[["b", "a"]])


def test_module_without_gradient_follows_weights():
    torch = pytest.importorskip("torch")
    from onnxgrad.torch import OnnxModule

    module, X = OnnxModule(conv()), images(70)[0]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    for _ in range(2):
        for rows in (1, 70):
            with torch.no_grad():
                found = module(torch.from_numpy(X[:rows])).numpy()
            expected = by_session(module.to_onnx(), X[:rows])
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
        module(torch.from_numpy(X)).square().mean().backward()
        optimizer.step()
