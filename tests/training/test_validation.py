"""Validation: every form of its data gives the numbers of a plain session of the model as it is."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import onnxgrad as og
from tests.support.errors import naming
from tests.support.running import in_sweep, run
from tests.support.thread_groups import run_in_threads
from tests.support.trainings import normalized_model

RNG = np.random.default_rng(0)
X = (RNG.normal(size=(70, 3)) * 2 + 5).astype(np.float32)  # far from the statistics of the file
Y = (X @ np.float32([[1], [2], [3]])).astype(np.float32)
W = RNG.uniform(0.5, 2, 70).astype(np.float32)
EPOCHS, HELD, SIZE = 3, slice(0, 23), 10


# -- forms of validation data ---------------------------------------------------------------------


BATCHES = [(X[i : i + SIZE][: 23 - i], Y[i : i + SIZE][: 23 - i]) for i in range(0, 23, SIZE)]


class HeldOutBatches:
    """Batches whose number is unknown."""

    def __iter__(self):
        return iter(BATCHES)


def parquet_file(folder):
    if (file := folder / "valid.parquet").exists():
        return file, "label"
    columns = {f"c{i}": X[HELD, i] for i in range(3)} | {"label": Y[HELD, 0]}
    pq.write_table(pa.table(columns), file, row_group_size=7)
    return file, "label"


def torch_loader(folder):
    torch = pytest.importorskip("torch")
    rows = torch.utils.data.TensorDataset(torch.from_numpy(X[HELD]), torch.from_numpy(Y[HELD]))
    return torch.utils.data.DataLoader(rows, batch_size=SIZE)


FORMS = {
    "share": lambda folder: 0.3,
    "tuple": lambda folder: (X[HELD], Y[HELD]),
    "weighted": lambda folder: (X[HELD], Y[HELD], W[HELD]),
    "dict": lambda folder: {"x": X[HELD], "label": Y[HELD]},
    "list": lambda folder: BATCHES,
    "dicts": lambda folder: [{"x": x, "label": y} for x, y in BATCHES],
    "iterable": lambda folder: HeldOutBatches(),
    "function": lambda folder: lambda: iter(BATCHES),
    "loader": torch_loader,
    "parquet": parquet_file,
}
AVERAGES = {
    "none": lambda: og.optimizers.adam(),
    "ema": lambda: og.optimizers.ema(og.optimizers.adam(), 0.9),
    "swa": lambda: og.optimizers.swa(og.optimizers.adam(), start=3, every=2),
    "lookahead": lambda: og.optimizers.lookahead(og.optimizers.adam(), every=4),
    "schedule_free": lambda: og.optimizers.schedule_free(),
}
GROUPS = {  # arguments of DataParallel
    "alone": None,
    "group": {},
    "synchronized": {"sync_batch_norm": True},
}


# -- the test -------------------------------------------------------------------------------------


class CompareValidation(og.callbacks.Callback):
    """Compares the last entry of the history with other ways to compute it."""

    def __init__(self, form):
        self.form, self.compared = form, 0

    def on_evaluate(self, trainer, state, control):
        x, y, w = X[HELD], Y[HELD], W[HELD] if self.form == "weighted" else None
        if self.form == "share":
            if trainer._call.validated is not None:  # the training lets go of it at its end
                self.rows = trainer._call.validated.arrays
            x, y = self.rows["x"], self.rows["label"]
            assert len(x) == 21
        entry = {n.removeprefix("validation_"): v for n, v in state.history[-1].items()}
        given = {name: entry[name] for name in ("mse", "mae")}
        plain = run(trainer.model, x=x)[0].astype(np.float64) - y
        expected = {n: np.average(e[:, 0], weights=w) for n, e in error_terms(plain).items()}
        assert given == pytest.approx(expected, rel=1e-5)
        assert state.history[-1]["validation_loss"] == pytest.approx(expected["mse"], rel=1e-5)
        again = trainer.evaluate(x, y, sample_weight=w, batch_size=6)
        assert again == pytest.approx({"loss": expected["mse"], **expected}, rel=1e-5)
        predicted = trainer.predict(x) - y
        np.testing.assert_allclose(predicted, plain, rtol=1e-4, atol=1e-4)
        self.last = expected
        self.compared += 1


def error_terms(difference):
    return {"mse": difference**2, "mae": np.abs(difference)}


EVERY = list(itertools.product(FORMS, ("frozen", "train"), AVERAGES, GROUPS))
CHOSEN = {
    ("share", "train", "lookahead", "group"),
    ("tuple", "train", "none", "local"),
    ("weighted", "frozen", "swa", "local"),
    ("dict", "train", "schedule_free", "alone"),
    ("list", "train", "swa", "synchronized"),
    ("dicts", "frozen", "none", "alone"),
    ("iterable", "train", "ema", "alone"),
    ("function", "frozen", "lookahead", "group"),
    ("loader", "frozen", "schedule_free", "synchronized"),
    ("parquet", "train", "swa", "group"),
}


@pytest.mark.filterwarnings("ignore:the gradient of a batch is not proven")
@pytest.mark.parametrize(
    ("form", "batch_norm", "average", "group"),
    [case if case in CHOSEN else in_sweep(*case) for case in EVERY],
)
def test_validation_is_of_the_model_as_it_is(
    form, batch_norm, average, group, tmp_path, monkeypatch
):
    options = GROUPS[group]
    FORMS[form](tmp_path)  # which writes the file, if it is one

    def trained(rank=0):
        watch, stopping = CompareValidation(form), og.EarlyStopping(patience=1)
        recorder = og.callbacks.Recorder(tmp_path / "run", seconds=0, profile=0)
        trainer = og.Trainer(
            normalized_model(),
            "mse",
            optimizer=AVERAGES[average](),
            learning_rate=0.3,
            batch_norm=batch_norm,
            metrics=["mse", "mae"],
            callbacks=[watch, stopping, recorder],
            parallel=False if options is None else og.parallel.DataParallel(**options),
        )
        for count in (1, 2):  # the statistics are in the state from the second `fit` on
            trainer.fit(X, Y, validation=FORMS[form](tmp_path), epochs=EPOCHS, batch_size=SIZE)
            validated = [e["validation_loss"] for e in trainer.history]
            assert watch.compared >= count
            # the best weights were restored, and the report is of these
            watch.on_evaluate(trainer, restored(trainer, min(validated)), None)
            watch.compared -= 1
        assert watch.compared >= 3
        return trainer, watch

    results = [trained()] if options is None else run_in_threads(monkeypatch, trained)
    trainer, watch = results[0]
    recorded = json.loads((tmp_path / "run" / "run.json").read_text())
    assert recorded["history"] == trainer.history
    assert all(other.history == trainer.history for other, _ in results)
    if options is None:
        (column,) = recorded["examined"]["outputs"][0]["columns"]
        if form != "weighted":
            assert column["rmse"] == pytest.approx(watch.last["mse"] ** 0.5, rel=1e-5)


@pytest.mark.filterwarnings("ignore:the gradient of a batch is not proven")
def test_running_statistics_of_a_group_are_those_of_all_rows(monkeypatch):
    """Each process has statistics of its rows; their means, by the number of rows, are kept."""
    options = {"optimizer": "sgd", "learning_rate": 1e-6, "batch_norm": "train"}

    def statistics(rank):
        made = og.Trainer(normalized_model(), "mse", parallel=og.parallel.DataParallel(), **options)
        made.fit(X[:21], Y[:21], batch_size=21, shuffle=False)
        return made.state.buffers

    for buffers in run_in_threads(monkeypatch, statistics):
        expected = 0.9 * np.float32([0.5, 0, 0]) + 0.1 * X[:21].mean(axis=0)
        np.testing.assert_allclose(buffers["mean"], expected, rtol=1e-5)


def restored(trainer, best):
    """Return a state whose last entry is the best one."""
    (entry,) = [e for e in trainer.history if e["validation_loss"] == best][:1]
    return SimpleNamespace(history=[entry])


@pytest.mark.parametrize(
    "given",
    [True, 1, np.int64(0), 0.0, 1.0, np.True_, [X, Y], [X, Y, W], [X, "label"]],
    ids=str,
)
def test_validation_that_is_neither_share_nor_data(given):
    with pytest.raises(ValueError, match=naming("validation", "(X, y)")):
        og.Trainer(normalized_model(), "squared_error").fit(X, Y, validation=given)


def test_shares_of_other_types_are_shares():
    first, *others = (
        og.Trainer(normalized_model(), "squared_error").fit(X, Y, validation=share).history
        for share in (0.25, np.float32(0.25), np.array(0.25))
    )
    assert others == [first, first]
