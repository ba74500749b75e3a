"""One call of `fit` of an estimator, by the objective, step and loop of a `Trainer`; its state."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import numpy as np

from onnxgrad.compat.learning_rates import ByEpoch
from onnxgrad.compat.rows_and_penalty import rows_of
from onnxgrad.data.columns import Names
from onnxgrad.model import weights as constants
from onnxgrad.model.read import read
from onnxgrad.model.write import save
from onnxgrad.native import Target
from onnxgrad.optimizers import Optimizer, sgd
from onnxgrad.runtime.device import Device
from onnxgrad.training.batches import ArraySource, BatchSource
from onnxgrad.training.callbacks.base import Callback, Control
from onnxgrad.training.callbacks.events import Callbacks
from onnxgrad.training.data import Dataset
from onnxgrad.training.diagnose import cause_in_fit, rerun_failed_call
from onnxgrad.training.evaluator import Evaluator
from onnxgrad.training.fields import Fields
from onnxgrad.training.glorot import glorot
from onnxgrad.training.loop import Loop
from onnxgrad.training.modes import warn_of_stale_statistics
from onnxgrad.training.objective import build_objective
from onnxgrad.training.progress import FitProgress
from onnxgrad.training.run.in_place import new_runner
from onnxgrad.training.state import Arrays, TrainState, Values
from onnxgrad.training.step.build import Step, StepOptions, build_step
from onnxgrad.training.step.epoch import build_epoch
from onnxgrad.training.step.update import evaluated

INITS: Mapping[str, Callable[[np.random.Generator, np.ndarray], np.ndarray]] = {
    "model": lambda rng, w: w,
    "glorot": glorot,
    "normal": lambda rng, w: rng.standard_normal(w.shape).astype(w.dtype) if w.ndim > 1 else w,
}


@dataclass(eq=False)
class EstimatorState(TrainState):
    """A `TrainState` that also keeps what an estimator reads after `fit`."""

    rng: np.random.Generator | None = None  # orders the rows of all epochs
    optimizer: Optimizer = field(default_factory=sgd)  # to which the slots belong
    trained: list[str] = field(default_factory=list)  # names of the weights of the last `fit`
    flat: bool = False  # whether the labels of `fit` had one axis
    columns: list[str] | None = None  # their names in the table X of `fit`
    names: Names = field(default_factory=Names)  # of the columns for all inputs and the label

    def weights_to_evaluate(self) -> Arrays:
        """Return the weights to evaluate: averages, if the optimizer keeps them."""
        now = self.values
        return evaluated(self.optimizer, now.weights, now.slots, now.steps)

    def copy(self) -> Self:
        """Return an independent copy, which is not running."""
        new = super().copy()
        new.rng, new.names = copy.deepcopy(self.rng), self.names.copy()
        return new


class EstimatorFit:
    """One call of `fit`: from data and arguments to objective, step, runner and loop.

    Everything is checked before the loop is returned; nothing of the trainer is changed.

    `trainer` is a `SeedTrainer`, `held_out` are validation data, `callback` is a function.
    """

    def __init__(
        self, trainer: Any, data: Dataset, held_out: Dataset | None, callback: Any = None
    ) -> None:
        self.callbacks = Callbacks([] if callback is None else [ProgressFunction(callback, self)])
        self.trainer, self.data, self.held_out = trainer, data, held_out
        self.rate, self.optimizer = trainer._rate_and_optimizer()
        self.before = vars(trainer).get("_state") if trainer.warm_start else None
        self.proto, self.names = trainer._model(self.before), trainer._names(announce=True)
        trainer._check_names(self.names)
        warn_of_stale_statistics(read(trainer.model_onnx))
        self.weighted = data.weighted or (held_out is not None and held_out.weighted)
        self.device = Device.of(trainer.device)

    def begin(self) -> Loop:
        """Return the loop of the epochs; the state is on the device."""
        trainer, (step, fields) = self.trainer, self._step()
        state = self._first_state(step.weights)
        state.flat = np.ndim(self.data.y) == 1  # as predictions are then: y - f is not (rows, rows)
        state.names, state.columns = fields.names, self.data.columns
        source = self.data.source(fields, trainer.batch_size)
        plan = trainer._plan(step.weights, self.weighted)
        evaluator = Evaluator(self.proto, step.weights, plan, self.weighted, self.device, {})
        evaluate = None
        if self.held_out is not None:
            evaluator.fields.names = fields.names
            validation = rows_of(self.held_out, evaluator.fields)
            evaluate = partial(_evaluate, evaluator, state, validation)
        target = Target.of(self.device, work := step.work * source.batch_size, source.batch_size)
        runner, every = new_runner(step, target, work), trainer.validation_every
        state.begin(runner)
        self.loop = Loop(
            trainer,
            state,
            runner,
            ByEpoch(self.rate, state.losses),
            source,
            self.callbacks,
            lambda _: state.rng,
            last_epoch=state.epoch + trainer.max_iter,
            evaluate=evaluate,
            evaluate_every=max(1, int(every if every >= 1 else every * trainer.max_iter)),
            singly=not isinstance(source, ArraySource),
            log_steps=trainer.enable_logging,
            log_epochs=bool(trainer.verbose or trainer.enable_logging),
            explain=lambda loop: self._explain(loop, state, evaluator),
        )
        step.warn(stacklevel=3)
        if trainer.saved_gradient is not None:
            save(trainer._gradient(self.proto, step.weights), trainer.saved_gradient)
            plain = build_epoch(self._step()[0])  # the runner's is not of standard operators only
            save(plain, f"{os.fspath(trainer.saved_gradient)}.training.onnx")
        return self.loop

    def _step(self) -> tuple[Step, Fields]:
        """Return the step, and what checks its data against the columns of an earlier `fit`."""
        plan, on_cpu = self.trainer._plan(self.names, self.weighted), self.device.kind == "cpu"
        objective = build_objective(self.proto, self.names, plan, self.weighted)
        in_place = on_cpu and self.trainer.saved_gradient is None
        step = build_step(objective, self.optimizer, StepOptions(blocks=on_cpu, in_place=in_place))
        fields = Fields(objective)
        if self.before is not None:
            fields.names = self.before.names.copy()
        return step, fields

    def _first_state(self, trained: list[str]) -> EstimatorState:
        """Return the state that training begins with: a new one, or a copy of the one before."""
        trainer, before = self.trainer, self.before
        arrays = {ref.name: ref.array() for ref in constants.constant_refs(self.proto)}
        if before is None:
            rng, draw = np.random.default_rng(trainer.random_state), INITS[trainer.weight_init]
            state, reached = EstimatorState(rng=rng), set(trained)
            names = [name for name in self.names if name in reached]
            state.values = Values({name: draw(rng, arrays[name]) for name in names})
        else:
            state, old = before.copy(), before.values
            weights = old.weights | {name: arrays[name] for name in trained}
            same = self.optimizer == before.optimizer and old.slots.keys() >= set(trained)
            state.values = Values(weights, old.slots, old.steps) if same else Values(weights)
            state.position, state.pending, state.running = 0, False, {}  # of an unfinished epoch
        state.optimizer, state.trained, state.stop_reason = self.optimizer, trained, None
        return state

    def _explain(self, loop: Loop, state: EstimatorState, evaluator: Evaluator) -> str:
        """Return why the loop ended."""
        file = read(self.trainer.model_onnx)
        failed = lambda: rerun_failed_call(self._step()[0], loop, self.device, file)  # noqa: E731
        outputs = evaluator.plan.read_outputs(file)
        return cause_in_fit(loop, file, outputs, failed, evaluator, state.weights_to_evaluate())


def _evaluate(evaluator: Evaluator, state: EstimatorState, source: BatchSource) -> dict[str, float]:
    return {"validation_loss": evaluator.evaluate(state.weights_to_evaluate(), source)["loss"]}


class ProgressFunction(Callback):
    """Calls a function of the progress after calls of the runtime and after evaluations."""

    def __init__(
        self, function: Callable[[FitProgress], bool | str | None], call: EstimatorFit
    ) -> None:
        if not callable(function):
            raise ValueError(
                f"callback must be a function of a Progress, not {function!r}: see FitProgress"
            )
        self.function, self.call = function, call

    def on_step_end(self, trainer: Any, state: TrainState, control: Control) -> None:
        """Call the function, and end training if it says so."""
        answer: Any = self.function(self.call.loop.progress)
        if isinstance(answer, (bool, np.bool_)):
            control.stop |= not answer
        elif isinstance(answer, str) and answer == "stop":
            control.stop = True
        elif answer is not None:
            raise ValueError(
                f"the callback returned {answer!r}: return None or True to continue, "
                "False or 'stop' to end training"
            )

    on_evaluate = on_step_end
