"""Options of training with options: drawn ones give what PyTorch gives, or an error that says why.

A draw that fails prints its options; `pytest -k "test_draw[123]"` runs it alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import onnxgrad as og
from onnxgrad.model import weights as model_weights
from onnxgrad.training.run import states
from tests.support.errors import naming
from tests.support.models import initializer_arrays
from tests.support.running import in_sweep, run_named
from tests.support.trainings import ActAtStep, interrupt_training

torch = pytest.importorskip("torch")
from tests.support import matrix_options as drawing  # noqa: E402  # which imports torch
from tests.support.matrix_options import DrawnRows, Options  # noqa: E402
from tests.support.matrix_witness import Witness  # noqa: E402

DRAWS = 2000
# the first ones that cover each value of each option together, and each error
CHOSEN = {0, 2, 4, 6, 9, 14, 15, 17, 18, 23, 24, 32, 55, 81, 328, 392, 417, 522, 535}
CHOSEN |= {7, 11, 13, 65}
TOLERANCE = {"double": 1e-7, "float": 2e-3}


class DrawnTraining:
    """The data of a draw, its training, and comparisons of what comes out."""

    def __init__(self, options: Options, folder: Path) -> None:
        self.options, self.folder, self.compared = options, folder, 0
        self.rows = self.trained_rows = DrawnRows(options, 1)
        self.others = self.held_out = DrawnRows(options, 2)
        if options.validation == "share":
            order = np.random.default_rng([5, 1]).permutation(options.rows)
            held_out = round(options.rows * 0.25)
            self.trained_rows = DrawnRows(options, 1, tuple(sorted(order[held_out:])))
            self.held_out = DrawnRows(options, 1, tuple(sorted(order[:held_out])))
        self.steps = len(self.trained_rows.batches()) * options.epochs

    def train(self) -> og.Trainer:
        """Train as the options say."""
        options, folder = self.options, self.folder / "run"
        common = {"batch_size": options.batch_size, "shuffle": options.shuffle}
        if options.call == "partial_fit":
            made = drawing.drawn_trainer(options, self.steps)
            for _ in range(options.epochs):
                made.partial_fit(**self.rows.arguments(options.kind, self.folder), **common)
            return made
        if options.validation:
            common["validation"] = self.validation()

        def fit(epochs: int, *callbacks: og.callbacks.Callback, **more: Any) -> og.Trainer:
            made = drawing.drawn_trainer(options, self.steps, *callbacks)
            rows = self.rows.arguments(options.kind, self.folder)
            return made.fit(**rows, **common, epochs=epochs, **more)

        if not options.resume:
            return fit(options.epochs)
        saving = og.Checkpoint(folder, every_steps=2 if options.resume == "step" else None)
        if options.resume == "epoch" and options.schedule != "cosine":
            fit(1, saving)
        else:
            step = self.steps // (2 if options.resume == "step" else options.epochs)
            with pytest.raises(KeyboardInterrupt):
                fit(options.epochs, saving, ActAtStep("step_end", step, interrupt_training, None))
        return fit(options.epochs, og.Checkpoint(folder), resume=folder)

    def validation(self) -> Any:
        """Return the validation data in the form that the options name."""
        if self.options.validation == "share":
            return 0.25
        if self.options.validation == "tuple":
            return tuple(self.others.arguments("arrays", self.folder).values())
        return self.others.arguments(self.options.validation, self.folder)["X"]

    def plainly_trained(self) -> og.Trainer:
        """Train with no more than what decides the masks of dropout."""
        made = drawing.drawn_trainer(replace(self.options, recompute="none"), self.steps)
        rows = self.trained_rows.arguments("arrays", self.folder)
        options = self.options
        return made.fit(
            **rows, batch_size=options.batch_size, shuffle=options.shuffle, epochs=options.epochs
        )

    def same(self, what: str, ours: Any, theirs: Any) -> None:
        """Compare numbers with those of the witness."""
        theirs = np.asarray(theirs)
        assert np.shape(ours) == theirs.shape, what
        limit = TOLERANCE[self.options.dtype] * max(1.0, np.abs(theirs).max())
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=limit, err_msg=what)
        self.compared += 1

    def same_values(self, what: str, ours: Mapping, theirs: Mapping) -> None:
        """Compare the weights that train, and the statistics that are counted."""
        names = {*self.options.trained}
        names |= {"mean", "variance"} if self.options.batch_norm == "train" else set()
        for name in sorted(names):
            self.same(f"{what} {name}", ours[name], theirs[name])

    def compare(self, trainer: og.Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
        """Compare weights, history, evaluation, prediction and file with those of a witness."""
        options = self.options
        witness = Witness(options, self.held_out if options.validation else None)
        if options.dropout:
            monkeypatch.undo()
            plain = self.plainly_trained()
            weights, history = plain.state.weights, plain.history
            evaluated = plain.evaluated()
            values = witness.values | {n: torch.tensor(np.float64(a)) for n, a in evaluated.items()}
        else:
            witness.fit(self.trained_rows, self.steps)
            weights = {n: v.detach().numpy() for n, v in witness.values.items()}
            values, history = witness.evaluated, witness.history
            evaluated = {n: v.detach().numpy() for n, v in values.items()}
        for name in options.trained:
            self.same(f"weight {name}", trainer.state.weights[name], weights[name])
        self.same_values("evaluated", trainer.evaluated(), evaluated)
        assert len(trainer.history) == options.epochs
        for epoch, (ours, theirs) in enumerate(zip(trainer.history, history, strict=True)):
            for name in [name for name in theirs if name == "loss" or "validation" in name]:
                self.same(f"{name} of epoch {epoch}", ours[name], theirs[name])
        if options.validation:
            results, _ = witness.evaluate(self.held_out, values)
            for name, value in results.items():
                self.same(f"last {name}", trainer.history[-1][f"validation_{name}"], value)
        self.compare_results(trainer, witness, values)

    def compare_results(self, trainer: og.Trainer, witness: Witness, values: Any) -> None:
        """Compare what the trainer and the file that it saves compute for other rows."""
        options, folder = self.options, self.folder / "others"
        folder.mkdir()
        size = options.batch_size if options.carry else 3
        results, predictions = witness.evaluate(self.others, values)
        given = self.others.arguments(options.kind, folder)
        found = trainer.evaluate(**given, batch_size=size)
        assert found.keys() == results.keys()
        for name, value in results.items():
            self.same(f"evaluate: {name}", found[name], value)
        given = self.others.arguments(options.kind, folder)
        self.same("predict", trainer.predict(given["X"], batch_size=size), predictions)
        trainer.save(self.folder / "saved.onnx")
        saved = onnx.load(self.folder / "saved.onnx")
        arrays = initializer_arrays(saved)
        self.same_values("saved", arrays, {n: v.detach().numpy() for n, v in values.items()})
        dtype = arrays["w2"].dtype
        first = {name: a.astype(dtype) for name, a in self.others.batches()[0].items()}
        ours = run_named(saved, first)["y"]
        self.same("file", ours, predictions[: len(ours)])

    @property
    def comparisons(self) -> int:
        """How many numbers and arrays there are to compare."""
        options = self.options
        trained, results = len(options.trained), 1 if options.weighted else 2
        values = trained + (2 if options.batch_norm == "train" else 0)
        by_epoch = 1 + (results if options.validation and not options.dropout else 0)
        last = results if options.validation else 0
        return trained + 2 * values + options.epochs * by_epoch + last + results + 2


@pytest.fixture
def exactly(monkeypatch):
    """Let Muon of PyTorch compute in the dtype of the weights, and NAdam in float64."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize(
    "number", [number if number in CHOSEN else in_sweep(number) for number in range(DRAWS)]
)
def test_draw(number, exactly, tmp_path):
    options = drawing.draw_options(number)
    print(options)
    draw = DrawnTraining(options, tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        if options.large:
            patch.setattr(model_weights, "LARGE", 0)
            patch.setattr(model_weights, "TENSOR_BYTES", 90)
            patch.setattr(states, "PART", 64)
        if options.refused:
            with pytest.raises(ValueError, match=naming(*options.refused)):
                draw.train()
            return
        draw.compare(draw.train(), patch)
    assert draw.compared == draw.comparisons


def test_how_many_draws_are_compared():
    """The draws cover every choice, and few are of options that exclude each other."""
    options = [drawing.draw_options(number) for number in range(DRAWS)]
    compared = [each for each in options if not each.refused]
    assert len(compared) >= 0.85 * DRAWS
    chosen = [options[number] for number in sorted(CHOSEN)]
    assert {each.refused for each in chosen} == {each.refused for each in options}
    for field in ("optimizer", "wrapper", "groups", "clipping", "kind", "validation", "resume"):
        counts = Counter(getattr(each, field) for each in compared)
        assert min(counts.values()) >= DRAWS / 100, field
        assert counts.keys() == {getattr(each, field) for each in chosen if not each.refused}, field
    assert min(DrawnTraining(each, Path()).comparisons for each in compared) >= 7
