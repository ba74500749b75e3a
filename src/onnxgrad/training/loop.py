"""The one loop of training: epochs of slices of batches, with events between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onnxgrad.errors import ConvergenceError
from onnxgrad.schedules.rates import Rates
from onnxgrad.training.batches import ArraySource, BatchSource
from onnxgrad.training.callbacks.base import Callbacks, TrainingControl
from onnxgrad.training.diagnose import divergence_error, warn_of_no_label
from onnxgrad.training.interrupts import Interrupts
from onnxgrad.training.progress import FitProgress, Totals, over_members
from onnxgrad.training.run.runner import Asked, Losses, Runner
from onnxgrad.training.state import TrainState
from onnxgrad.training.step.inputs import FIRST, Batch, Slice
from onnxgrad.training.step.loss_scale import SCALE, SKIPPED

# why `fit` ended
MAX_ITER, CALLBACK, NOT_FINITE = "max_iter", "callback", "not finite"
INTERRUPTED, ERROR = "interrupted", "error"


@dataclass
class Loop:
    """The epochs of one call of `fit`, whose arguments are checked already.

    - `trainer`: what callbacks are shown.
    - `order`: returns the generator that orders the rows of an epoch; None for no other order.
    - `first_epoch`: the number of finished epochs from which progress counts, 0 of a training that
      is resumed.
    - `last_epoch`: the number at which training ends.
    - `evaluate`: returns the entries that an evaluation adds to the history, none if it is not due;
      None without data.
    - `explain`: says why the loss or a weight is not finite, and what helps.
    - `label_misfit`: says which label of a batch does not fit its prediction; None if all fit.
    """

    trainer: Any
    state: TrainState
    runner: Runner
    rates: Rates
    source: BatchSource
    callbacks: Callbacks
    order: Callable[[TrainState], np.random.Generator | None]
    first_epoch: int
    last_epoch: int
    evaluate: Callable[[], dict[str, float]] | None = None
    explain: Callable[[Any], str] = lambda loop: "Lower the learning rate, or scale the data"
    label_misfit: Callable[[Batch], str | None] = lambda batch: None
    control: TrainingControl = field(default_factory=TrainingControl)
    interrupts: Interrupts = field(default_factory=Interrupts)
    sample: tuple[Slice, np.ndarray, int] | None = None  # arguments of a run, while it trains
    failed: tuple[Slice, np.ndarray, int] | None = None  # arguments of the run that gave NaN

    def __post_init__(self) -> None:
        self._began = self.runner.now.steps
        self._totals = self._resumed_totals()
        self._seconds = [0.0, 0.0]  # waiting for data, and computing
        self._asked = False  # whether the next step tells the requests of all processes
        self._before: Callable[[], None] | None = None  # sets back to the end of that step
        last = self.state.validation_losses[-1:]
        self._validated = over_members(last[0]) if last else None
        self.progress = self._progress_after(0.0)

    def _resumed_totals(self) -> Totals:
        state = self.state
        return Totals.of(self.runner.step.factors, state.running, state.members)

    @property
    def _learning_rate(self) -> Any:
        """The rate of the last step; of a stack (members,)."""
        rate = self.state.learning_rate
        return rate if self.state.members is None else np.array(rate)

    @property
    def _epochs_done(self) -> int:
        """The number of finished epochs of this `fit`."""
        return self.state.epoch - self.first_epoch

    def _progress_after(self, seconds: float) -> FitProgress:
        """Return the progress of training after so many seconds of this epoch."""
        state, totals, source = self.state, self._totals, self.source
        steps = None
        if isinstance(source.batches, int):
            steps = state.step - state.position + (self.last_epoch - state.epoch) * source.batches
        return FitProgress(
            self._epochs_done,
            self.last_epoch - self.first_epoch,
            totals.rows,
            source.rows,
            over_members(totals.mean),
            self._validated,
            totals.rows / max(seconds, 1e-9),
            state.step,
            steps,
            *self._seconds,
        )

    def let_go(self) -> None:
        """Let go of the data, and of what refers to this loop, once training has ended.

        States in a circle of references would stay in memory until the garbage is collected.
        """
        vars(self).update(source=None, evaluate=None, explain=None, label_misfit=None, _before=None)

    @property
    def moved(self) -> bool:
        """Return whether a slice of batches was finished."""
        return self.runner.now.steps != self._began

    def run(self) -> None:
        """Run the epochs; `state.stop_reason` says why they ended.

        Raises:
            ConvergenceError: the loss, a weight or the validation loss is not finite.
        """
        state = self.state
        held = self.interrupts.held
        with self.interrupts.installed():
            try:
                with self.callbacks.training(self.trainer, state, self.control, held):
                    self._run_epochs()
            finally:
                self.sample = None  # which holds data
                with held():
                    state.end()

    def _run_epochs(self) -> None:
        state = self.state
        try:
            with self._whole_or_nothing():
                self._share_requests()
                self._obey_requests()
            while state.epoch < self.last_epoch and not self.control.stop:
                if (count := self.unseen_epochs()) > 1:
                    self._epochs_at_once(count)
                else:
                    self._run_epoch()
            self.runner.collect()
            state.stop_reason = CALLBACK if self.control.stop else MAX_ITER
        except (KeyboardInterrupt, SystemExit):
            state.stop_reason = INTERRUPTED
            raise
        except ConvergenceError:
            state.stop_reason = NOT_FINITE
            raise
        except BaseException:
            state.stop_reason = ERROR
            raise

    @contextmanager
    def _whole_or_nothing(self, restore: Callable[[], None] | None = None) -> Iterator[None]:
        """Set the state back if the block breaks off, so that a resumed training runs all of it.

        `restore`: sets it back to an earlier state than the one before the block.
        """
        restore = restore or self.state.memento()
        try:
            yield
        except ConvergenceError:
            raise
        except BaseException:
            restore()
            raise

    def unseen_epochs(self) -> int:
        """Return how many epochs the next call of the runtime may run, as nothing looks in between.

        Up to 1: none of them, or a part of one, as any other call. Small models take longer to be
        called than to be trained: for a step of 30 microseconds, an epoch of 50 of them takes
        1.5 ms, and the Python around its call half a millisecond.
        """
        state, source, runner = self.state, self.source, self.runner
        if self.callbacks.all or self.evaluate is not None or not isinstance(source, ArraySource):
            return 1
        if not runner.joins_epochs:  # what freezes members, or updates in place, looks
            return 1
        step, begun = runner.step, state.position or state.pending
        if begun or step.scaled or FIRST.name in step.inputs.feeds or not self.rates.steady:
            return 1
        most = min(source.joins, runner.budget() // source.batches)
        return min(most, self.last_epoch - state.epoch)

    def _epochs_at_once(self, count: int) -> None:
        """Run epochs between which nothing looks at the state, in one call of the runtime."""
        state, source, start = self.state, self.source, time.perf_counter()
        assert isinstance(source, ArraySource)
        with self.interrupts.held(), self._whole_or_nothing():
            first, orders = state.epoch, []
            for state.epoch in range(first, first + count):
                orders.append(self.order(state))
            state.epoch = first
            piece, batches = source.epochs(orders), source.batches
            rates = self.rates.at(state.step, piece.batches)
            losses = self._run_steps(piece, rates, 0)
            for i in range(count):
                part = slice(i * batches, (i + 1) * batches)
                self._totals = self._resumed_totals()
                if losses is None:  # one of these epochs has the step that is not finite
                    self._run_slice(piece.part_of(part.start, batches))
                else:
                    own = Losses(losses.sums[part], losses.counts[part])
                    self._count_steps(batches, piece.rows, rates[part], own)
                state.pending = False
                self._record_epoch(0 if losses is None else (count - 1 - i) * batches)
                self.rates.observe(state.history[-1])
        self.progress = self._progress_after(time.perf_counter() - start)

    def _run_epoch(self) -> None:
        """Run one epoch, or the rest of it; end early if a callback says so."""
        state, start = self.state, time.perf_counter()
        self._totals, self._seconds = self._resumed_totals(), [0.0, 0.0]
        with self._whole_or_nothing():
            self._call_and_agree("on_epoch_begin")
            self._obey_requests()
        if self.control.stop:
            return
        restore = None
        if state.pending:
            restore = self._end_step()
            if self._ends_surely and restore is None:
                return
        with closing(self._timed_slices()) as slices:  # which ends a thread that reads ahead
            for piece in slices:
                if not self._run_whole_slice(piece):  # a process has asked for something before
                    with self._whole_or_nothing(self._before):
                        self._obey_requests()
                    if self.control.stop:
                        return
                    self._run_whole_slice(piece)
                self.progress = self._progress_after(time.perf_counter() - start)
                restore = self._end_step()
                if self._ends_surely and restore is None and self._goes_on(slices):
                    return
        if self._asked:  # and no step has followed
            self._share_requests()
        with self._whole_or_nothing(restore):
            self._finish_epoch()

    @property
    def _ends_surely(self) -> bool:
        """Whether it is known of all processes that training ends."""
        return self.control.stop and not self._asked

    def _run_whole_slice(self, piece: Slice) -> bool:
        """Run the steps of a slice; False: none, as a process has requests of the step before."""
        try:
            with self.interrupts.held(), self._whole_or_nothing():
                self._run_slice(piece)
        except Asked as e:
            self.control.stop, self.control.save, self.control.evaluate = e.requests
            return False
        finally:
            self._asked = False
        self._before = None  # it holds a state
        return True

    def _end_step(self) -> Callable[[], None] | None:
        """Call the events of a step; return what undoes them, if the end of the epoch follows."""
        restore = self.state.memento()
        with self._whole_or_nothing(restore):
            self.state.pending = False
            self._call_event("on_step_end")
            control, source = self.control, self.source
            if source.rows == self._totals.rows or source.batches == self.state.position:
                self._share_requests()
                return restore  # requests are obeyed at the end, in one entry of the history
            requests = [control.stop, control.save, control.evaluate]
            self._asked = not control.freeze and self.runner.ask(requests)
            if self._asked:
                self._before = restore
            else:
                self._share_requests()
                self._obey_requests()
        return None

    def _goes_on(self, slices: Iterator[Slice]) -> bool:
        """Return whether an epoch that `_end_step` has not ended has further batches."""
        known = self.source.rows is not None or self.source.batches is not None
        return known or next(slices, None) is not None

    def _timed_slices(self) -> Generator[Slice, None, None]:
        """Yield the slices of the epoch, and measure the time until each is there."""
        state = self.state
        done = state.step - state.position  # in earlier epochs
        slices = self.source.epoch(
            self.order(state), state.position, lambda batch: self._most_batches(done + batch)
        )
        try:
            while True:
                start = time.perf_counter()
                piece = next(slices, None)
                self._seconds[0] += time.perf_counter() - start
                if piece is None:
                    return
                yield piece
        finally:
            slices.close()

    def _most_batches(self, step: int) -> int:
        """Return how many batches a call may run that begins with this step."""
        most = self.runner.budget()
        return min(most, self.callbacks.steps_until_stop(step) or most)

    def _run_slice(self, piece: Slice) -> None:
        """Run the steps of a slice, and count them."""
        state, start = self.state, time.perf_counter()
        rates = self.rates.at(state.step, piece.batches)
        arguments = piece, rates, state.position
        if self.sample is None or piece.rows >= self.sample[0].rows:  # not a short last batch
            self.sample = arguments
        losses = self._run_steps(*arguments)
        self._seconds[1] += time.perf_counter() - start
        if losses is None:
            state.learning_rate, self.failed = rates[-1].tolist(), arguments
            kept = "the state before it is kept"
            raise divergence_error(self, "the loss or a weight", self._epochs_done + 1, kept)
        self._count_steps(piece.batches, piece.rows, rates, losses)

    def _run_steps(self, piece: Slice, rates: np.ndarray, position: int) -> Losses | None:
        """Return the losses of the steps of a slice; None if one is not finite.

        Raises:
            ValueError: onnxruntime fails, as a label does not fit its prediction.
        """
        try:
            return self.runner.run(piece, rates, position)
        except Asked:
            raise
        except Exception as e:
            misfits = map(self.label_misfit, piece.each(position))
            if misfit := next(filter(None, misfits), None):
                raise ValueError(misfit) from e
            raise

    def _count_steps(self, batches: int, rows: int, rates: np.ndarray, losses: Losses) -> None:
        """Count steps in the state, one for each of the batches of so many rows."""
        state = self.state
        state.learning_rate = rates[-1].tolist()
        state.position, state.pending = state.position + batches, True
        self._totals.add(losses.sums, losses.counts, batches * rows)
        state.running = self._totals.to_json()

    def _finish_epoch(self) -> None:
        """Record a finished epoch, and evaluate."""
        self.runner.collect()
        self._record_epoch()
        entry = self.state.history[-1]
        if self.evaluate is not None:
            self._evaluate_into(entry)
        self.rates.observe(entry)
        self._call_and_agree("on_epoch_end")
        self._obey_requests()

    def _record_epoch(self, further: int = 0) -> None:
        """Count the epoch, and add it to the history; `further` steps after it are done."""
        state, loss = self.state, self._totals.mean
        entry: dict[str, Any] = {
            "step": state.step - further,
            "epoch": state.epoch + 1,
            "loss": loss,
        }
        entry["learning_rate"] = self._learning_rate
        if self.runner.step.scaled:
            buffers = [state.buffers[name] for name in (SCALE, SKIPPED)]
            entry["loss_scale"], entry["skipped_steps"] = (
                a.tolist() if state.members is None else a.copy() for a in buffers
            )
        with self.interrupts.held():
            state.epoch, state.position, state.running = state.epoch + 1, 0, {}
            state.history.append(entry)
        warn_of_no_label(loss, state.epoch)

    def _evaluate_into(self, entry: dict[str, Any]) -> None:
        """Evaluate, and add the results to an entry, which becomes the last one of the history."""
        assert self.evaluate is not None
        self.runner.collect()  # an average of weights may be among the slots
        results, history = self.evaluate(), self.state.history
        if not results:
            return
        fine = np.isfinite(results["validation_loss"])
        if not fine.any():
            kept = "the state after that epoch is kept"
            raise divergence_error(self, "the validation loss", self._epochs_done, kept)
        if not fine.all():
            self.runner.freeze(np.flatnonzero(~fine).tolist(), not_finite=True)
        entry.update(results)
        if not history or history[-1] is not entry:
            history.append(entry)
        self._validated = over_members(results["validation_loss"])
        self.progress.validation_loss = self._validated
        self.control.evaluate = False
        self._call_and_agree("on_evaluate")

    def _call_event(self, event: str) -> None:
        self.callbacks.call(event, self.trainer, self.state, self.control)

    def _call_and_agree(self, event: str) -> None:
        self._call_event(event)
        self._share_requests()

    def _share_requests(self) -> None:
        """Let all processes that share the training have the requests of each."""
        control = self.control
        requests = self.runner.agree([control.stop, control.save, control.evaluate])
        control.stop, control.save, control.evaluate = requests

    def _obey_requests(self) -> None:
        """Freeze members, evaluate and save, if a callback asked for it."""
        control = self.control
        if control.freeze:
            members, asked = self.state.members, sorted(control.freeze)
            if members is not None and (unknown := [k for k in asked if k not in range(members)]):
                raise ValueError(
                    f"control.freeze has {unknown}, and the members are 0 to {members - 1}"
                )
            self.runner.freeze(asked)
            control.freeze = set()
            control.stop |= len(self.state.frozen) == members
        if control.evaluate and self.evaluate is not None:
            self._extra_evaluation()
        control.evaluate = False
        if control.save:
            control.save = False
            with self.interrupts.held():
                self.runner.collect()
                self.callbacks.save(self.trainer, self.state)
            self._call_and_agree("on_save")

    def _extra_evaluation(self) -> None:
        """Evaluate within an epoch, or after one that is not evaluated otherwise."""
        state = self.state
        last = state.history[-1] if state.history else {}
        if last.get("step") == state.step and "validation_loss" in last:
            return
        entry = last
        if last.get("step") != state.step:
            entry = {"step": state.step, "epoch": state.epoch}
            entry["learning_rate"] = self._learning_rate
        self._evaluate_into(entry)
        if entry is not last:
            self.rates.observe(entry)
