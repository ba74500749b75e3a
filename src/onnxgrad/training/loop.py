"""The training loop: epochs of slices (stacks of batches), with events of callbacks between."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

import numpy as np

from onnxgrad.errors import ConvergenceError
from onnxgrad.training.batches import ArraySource
from onnxgrad.training.callbacks.base import TrainingControl
from onnxgrad.training.diagnose import divergence_error, warn_of_no_label
from onnxgrad.training.run.runner import Losses, Runner
from onnxgrad.training.run.stages import StepRefused
from onnxgrad.training.state import FitProgress, LossTotals, TrainState, mean_over_members
from onnxgrad.training.step.gradients import SCALE, SKIPPED
from onnxgrad.training.step.inputs import FIRST, BatchSlice, RuntimeCall

# why `fit` ended
MAX_ITER, CALLBACK, NOT_FINITE = "max_iter", "callback", "not finite"
INTERRUPTED, ERROR = "interrupted", "error"


class Loop:
    """Runs the epochs of one call of `fit`, whose arguments are checked already.

    Args:
        call: the `Fit`, with its state, runner, source, rates and callbacks; until training ends.
        first_epoch: the index of the epoch from which progress counts; 0 in a resumed training.
        last_epoch: the count of finished epochs at which training ends.

    Attributes:
        progress: the `FitProgress`.
        sample: a call of the runtime with full batches, while the loop runs.
        failed: the call of the runtime that gave NaN or infinity; None: no call did.
    """

    def __init__(self, call: Any, first_epoch: int, last_epoch: int) -> None:
        self.call, self.first_epoch, self.last_epoch = call, first_epoch, last_epoch
        self.state: TrainState = call.state
        self.runner: Runner = call.runner
        self.control, self.interrupts = TrainingControl(), Interrupts()
        self.sample: RuntimeCall | None = None
        self.failed: RuntimeCall | None = None
        self._began = self.runner.now.steps
        self._totals = self._resumed_loss_totals()
        self._seconds = [0.0, 0.0]  # waiting for data, and computing
        self._asked = False  # whether the next step exchanges the requests of all processes
        # sets the state back to the end of the step before the requests are exchanged
        self._restore_before: Callable[[], None] | None = None
        last = self.state.validation_losses[-1:]
        self._validated = mean_over_members(last[0]) if last else None
        self.progress = self._progress_after(0.0)

    def _resumed_loss_totals(self) -> LossTotals:
        """Return the sums of the losses of the unfinished epoch, zeros before its first step."""
        state = self.state
        return LossTotals.from_saved(self.runner.step.factors, state.running, state.members)

    @property
    def _learning_rate(self) -> Any:
        """The learning rate of the last step; in a stack, an array (members,)."""
        rate = self.state.learning_rate
        return rate if self.state.members is None else np.array(rate)

    def _progress_after(self, seconds: float) -> FitProgress:
        """Return the progress of training after `seconds` seconds of the present epoch."""
        state, totals, source = self.state, self._totals, self.call.step_source
        steps = None
        if isinstance(source.batches, int):
            steps = state.step - state.position + (self.last_epoch - state.epoch) * source.batches
        return FitProgress(
            state.epoch - self.first_epoch,
            self.last_epoch - self.first_epoch,
            totals.rows,
            source.rows,
            mean_over_members(totals.mean),
            self._validated,
            totals.rows / max(seconds, 1e-9),
            state.step,
            steps,
            *self._seconds,
        )

    @property
    def has_trained(self) -> bool:
        """Whether a slice of batches was finished in this loop."""
        return self.runner.now.steps != self._began

    def run(self) -> None:
        """Run the epochs; `state.stop_reason` says why they ended.

        Raises:
            ConvergenceError: the loss, a weight or the validation loss is not finite.
        """
        state, call, held = self.state, self.call, self.interrupts.held
        with self.interrupts.installed():
            try:
                with call.callbacks.training(call.trainer, state, self.control, held):
                    self._run_epochs()
            finally:
                # `sample` and `call` hold data and states, and `call` refers to this loop: without
                # these lines, they would stay in memory until the garbage is collected
                self.sample = self._restore_before = None
                del self.call
                with held():
                    state.end()

    def _run_epochs(self) -> None:
        """Run the epochs, and set `state.stop_reason`."""
        state = self.state
        try:
            with self._restore_state_on_error():
                self._share_callback_requests()
                self._obey_callback_requests()
            while state.epoch < self.last_epoch and not self.control.stop:
                if (count := self.epochs_per_call()) > 1:
                    self._run_epochs_at_once(count)
                else:
                    self._run_epoch()
            self.runner.collect_slots()
            state.stop_reason = CALLBACK if self.control.stop else MAX_ITER
        except BaseException as e:
            interrupted = isinstance(e, (KeyboardInterrupt, SystemExit))
            failed = NOT_FINITE if isinstance(e, ConvergenceError) else ERROR
            state.stop_reason = INTERRUPTED if interrupted else failed
            raise

    @contextmanager
    def _restore_state_on_error(self, restore: Callable[[], None] | None = None) -> Iterator[None]:
        """Set the state back if the block raises an error, so that a resumed training repeats it.

        A `ConvergenceError` does not set the state back. `restore` sets the state back to an
        earlier one; None: to the state before the block.
        """
        restore = restore or self.state.memento()
        try:
            yield
        except ConvergenceError:
            raise
        except BaseException:
            restore()
            raise

    def epochs_per_call(self) -> int:
        """Return how many epochs the next call of the runtime may run.

        Several, if neither callbacks nor evaluations look at the state between the epochs. With 1
        or less, calls run slices of an epoch. Small models take longer to be called than to be
        trained: for a step of 30 microseconds, an epoch of 50 steps takes 1.5 ms, and the Python
        around its call half a millisecond.
        """
        state, call, runner = self.state, self.call, self.runner
        source, step = call.step_source, runner.step
        if call.callbacks.all or call.validated is not None or not isinstance(source, ArraySource):
            return 1
        if runner.member_shape or not runner.compute.joins_batches:  # runners read each step
            return 1
        begun = state.position or state.pending
        if begun or step.has_loss_scale or FIRST.name in step.feeds or not call.rates.steady:
            return 1
        most = min(source.most_joined_epochs, runner.batches_of_next_call() // source.batches)
        return min(most, self.last_epoch - state.epoch)

    def _run_epochs_at_once(self, count: int) -> None:
        """Run `count` epochs in one call of the runtime."""
        state, source, start = self.state, self.call.step_source, time.perf_counter()
        assert isinstance(source, ArraySource)
        with self.interrupts.held(), self._restore_state_on_error():
            first, orders = state.epoch, []
            for state.epoch in range(first, first + count):
                orders.append(state.row_order() if self.call.shuffle else None)
            state.epoch = first
            call, batches = self._call_for_slice(source.join_epochs(orders)), source.batches
            losses = self._run_runtime_call(call)
            if losses is None:  # run each epoch, to find the step that is not finite
                for i in range(0, count * batches, batches):
                    self._totals = self._resumed_loss_totals()
                    self._run_slice(call.batches_from(i, batches).piece)
                    self._count_epoch()
            else:
                self._record_epochs(call, losses, count)
        progress = self._progress_after(time.perf_counter() - start)
        self.progress = replace(progress, epoch=progress.epoch - 1)  # the last epoch that ended
        if (watcher := self.call.callbacks.watcher) is not None:
            watcher.on_epoch_end(self.call.trainer, state, self.control)

    def _record_epochs(self, call: RuntimeCall, losses: Losses, count: int) -> None:
        """Count `count` epochs, whose steps one call of the runtime has run, in the state."""
        state, batches = self.state, call.piece.batches // count
        factors, rows = self.runner.step.factors, batches * call.piece.rows
        totals = LossTotals.of_epochs(factors, losses, count, rows)
        for i, self._totals in enumerate(totals, 1):
            state.learning_rate = call.rates[i * batches - 1].tolist()
            self._count_epoch((count - i) * batches)

    def _count_epoch(self, further: int = 0) -> None:
        """Record an epoch that no callback and no evaluation follows; see `_record_epoch`."""
        self.state.pending = False
        self._record_epoch(further)
        self.call.rates.observe(self.state.history[-1])

    def _run_epoch(self) -> None:
        """Run one epoch, or the rest of a resumed epoch; end early if a callback asks for it."""
        state, start = self.state, time.perf_counter()
        self._totals, self._seconds = self._resumed_loss_totals(), [0.0, 0.0]
        with self._restore_state_on_error():
            self._call_event("on_epoch_begin")
            self._obey_callback_requests()
        if self.control.stop:
            return
        restore = None
        if state.pending:
            restore = self._end_step()
            if restore is None and self.control.stop and not self._asked:
                return
        source = self.call.step_source
        with closing(self._timed_slices()) as slices:  # closing ends a thread that reads ahead
            for piece in slices:
                if not self._run_whole_slice(piece):  # a process had requests in the step before
                    with self._restore_state_on_error(self._restore_before):
                        self._obey_callback_requests()
                    if self.control.stop:
                        return
                    self._run_whole_slice(piece)
                self.progress = self._progress_after(time.perf_counter() - start)
                restore = self._end_step()
                if restore is None and self.control.stop and not self._asked:
                    known = source.rows is not None or source.batches is not None
                    if known or next(slices, None) is not None:  # otherwise the epoch has ended
                        return
        if self._asked:  # no step has followed that exchanges the requests
            self._share_callback_requests()
        with self._restore_state_on_error(restore):
            self._finish_epoch()

    def _run_whole_slice(self, piece: BatchSlice) -> bool:
        """Run the steps of a slice of batches; return False if requests of callbacks came first.

        They do not run if a process had requests of callbacks after the step before.
        """
        try:
            with self.interrupts.held(), self._restore_state_on_error():
                self._run_slice(piece)
        except StepRefused as e:
            self.control.stop, self.control.save, self.control.evaluate = e.requests
            return False
        finally:
            self._asked = False
        self._restore_before = None  # the function holds a state in memory
        return True

    def _end_step(self) -> Callable[[], None] | None:
        """Call `on_step_end` of all callbacks, and carry out what they ask for in `control`.

        At the end of an epoch, requests are carried out later, together with those of the epoch;
        the function that is returned then undoes the call of the events.
        """
        restore = self.state.memento()
        with self._restore_state_on_error(restore):
            self.state.pending = False
            self._call_event("on_step_end", shares=False)
            control, source = self.control, self.call.step_source
            if source.rows == self._totals.rows or source.batches == self.state.position:
                self._share_callback_requests()
                return restore  # requests are carried out after the epoch is in the history
            requests = [control.stop, control.save, control.evaluate]
            self._asked = not control.freeze and self.runner.send_requests(requests)
            if self._asked:
                self._restore_before = restore
            else:
                self._share_callback_requests()
                self._obey_callback_requests()
        return None

    def _timed_slices(self) -> Generator[BatchSlice, None, None]:
        """Yield the slices of the epoch, and add up the time that reading each slice takes."""
        state, call = self.state, self.call
        done = state.step - state.position  # the count of steps of earlier epochs

        def most_batches_from(batch: int) -> int:
            most = self.runner.batches_of_next_call()
            return min(most, call.callbacks.steps_until_stop(done + batch) or most)

        order = state.row_order() if call.shuffle else None
        slices = call.step_source.epoch(order, state.position, most_batches_from)
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

    def _call_for_slice(self, piece: BatchSlice) -> RuntimeCall:
        """Return the `RuntimeCall` that runs the steps of a slice next, at their learning rates."""
        state = self.state
        rates = self.call.rates.rates_from(state.step, piece.batches)
        return RuntimeCall(piece, rates, state.position)

    def _run_slice(self, piece: BatchSlice) -> None:
        """Run the steps of a slice, and count them in the state.

        Raises:
            ConvergenceError: the loss or a weight is not finite.
        """
        start, call = time.perf_counter(), self._call_for_slice(piece)
        if self.sample is None or piece.rows >= self.sample.piece.rows:  # not a short last batch
            self.sample = call
        losses = self._run_runtime_call(call)
        self._seconds[1] += time.perf_counter() - start
        if losses is None:
            self.state.learning_rate, self.failed = call.rates[-1].tolist(), call
            epoch, kept = self.state.epoch - self.first_epoch + 1, "the state before it is kept"
            raise divergence_error(self, "the loss or a weight", epoch, kept)
        self._record_steps(call, losses)

    def _run_runtime_call(self, call: RuntimeCall) -> Losses | None:
        """Run a call of the runtime, and return the losses of its steps; None if one is not finite.

        Raises:
            ValueError: onnxruntime fails, as a label does not fit its prediction.
        """
        try:
            return self.runner.run(call)
        except StepRefused:
            raise
        except Exception as e:
            misfits = map(self.call.label_misfit, call.each_batch())
            if misfit := next(filter(None, misfits), None):
                raise ValueError(misfit) from e
            raise

    def _record_steps(self, call: RuntimeCall, losses: Losses) -> None:
        """Count the steps of a call in the state, and add up their losses."""
        state, piece = self.state, call.piece
        state.learning_rate = call.rates[-1].tolist()
        state.position, state.pending = state.position + piece.batches, True
        self._totals.add(*losses, piece.batches * piece.rows)
        state.running = self._totals.to_json()

    def _finish_epoch(self) -> None:
        """Record a finished epoch in the history, and evaluate the validation data."""
        self.runner.collect_slots()
        self._record_epoch()
        entry = self.state.history[-1]
        if self.call.validated is not None:
            self._evaluate_and_record(entry)
        self.call.rates.observe(entry)
        self._call_event("on_epoch_end")
        self._obey_callback_requests()

    def _record_epoch(self, further: int = 0) -> None:
        """Count a finished epoch, and add its entry to the history.

        `further`: the count of steps of later epochs that are done already.
        """
        state, loss = self.state, self._totals.mean
        entry: dict[str, Any] = {
            "step": state.step - further,
            "epoch": state.epoch + 1,
            "loss": loss,
        }
        entry["learning_rate"] = self._learning_rate
        if self.runner.step.has_loss_scale:
            buffers = [state.buffers[name] for name in (SCALE, SKIPPED)]
            entry["loss_scale"], entry["skipped_steps"] = (
                a.tolist() if state.members is None else a.copy() for a in buffers
            )
        with self.interrupts.held():
            state.epoch, state.position, state.running = state.epoch + 1, 0, {}
            state.history.append(entry)
        warn_of_no_label(loss, state.epoch)

    def _evaluate_and_record(self, entry: dict[str, Any]) -> None:
        """Evaluate validation data; add the results to `entry`, the last entry of the history."""
        self.runner.collect_slots()  # an average of weights may be among the slots
        results, history = self.call.validation_results(), self.state.history
        if not results:
            return
        fine = np.isfinite(results["validation_loss"])
        if not fine.any():
            epoch, kept = self.state.epoch - self.first_epoch, "the state after that epoch is kept"
            raise divergence_error(self, "the validation loss", epoch, kept)
        if not fine.all():
            self.runner.freeze_members(np.flatnonzero(~fine).tolist(), not_finite=True)
        entry.update(results)
        if not history or history[-1] is not entry:
            history.append(entry)
        self._validated = mean_over_members(results["validation_loss"])
        self.progress.validation_loss = self._validated
        self.control.evaluate = False
        self._call_event("on_evaluate")

    def _call_event(self, event: str, shares: bool = True) -> None:
        """Call the method `event` of each callback.

        With `shares`, the processes of a group then exchange the requests of their callbacks.
        """
        self.call.callbacks.call(event, self.call.trainer, self.state, self.control)
        if shares:
            self._share_callback_requests()

    def _share_callback_requests(self) -> None:
        """Exchange requests of callbacks, so that all processes of a group carry them all out."""
        control = self.control
        requests = self.runner.any_requests([control.stop, control.save, control.evaluate])
        control.stop, control.save, control.evaluate = requests

    def _obey_callback_requests(self) -> None:
        """Freeze members of a stack, evaluate and save, as callbacks asked for in `control`."""
        control = self.control
        if control.freeze:
            members, asked = self.state.members, sorted(control.freeze)
            if members is not None and (unknown := [k for k in asked if k not in range(members)]):
                raise ValueError(
                    f"a callback added {unknown} to control.freeze, and the stack has the members "
                    f"0 to {members - 1}: add indices of these members only"
                )
            self.runner.freeze_members(asked)
            control.freeze = set()
            control.stop |= len(self.state.frozen) == members
        if control.evaluate and self.call.validated is not None:
            self._evaluate_on_request()
        control.evaluate = False
        if control.save:
            control.save = False
            with self.interrupts.held():
                self.runner.collect_slots()
                self.call.callbacks.save(self.call.trainer, self.state)
            self._call_event("on_save")

    def _evaluate_on_request(self) -> None:
        """Evaluate the validation data as a callback asks for it.

        Nothing is done if the history has an evaluation after the same step.
        """
        state = self.state
        last = state.history[-1] if state.history else {}
        if last.get("step") == state.step and "validation_loss" in last:
            return
        entry = last
        if last.get("step") != state.step:
            entry = {"step": state.step, "epoch": state.epoch}
            entry["learning_rate"] = self._learning_rate
        self._evaluate_and_record(entry)
        if entry is not last:
            self.call.rates.observe(entry)


class Interrupts:
    """Holds signals back inside of `with interrupts.held():`, and raises them after the block.

    Elsewhere, signals are raised at once: Ctrl-C as `KeyboardInterrupt`, SIGTERM as `SystemExit`.
    After a signal was raised, further signals wait for the end of the next block, so that they do
    not interrupt saving the state. Only the main thread gets signals; handlers that the program has
    set stay.
    """

    def __init__(self) -> None:
        self._held, self._depth = False, 0
        self._waiting: int | None = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Install the handlers of signals for the block."""
        previous: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            own: dict[int, Any] = {
                signal.SIGINT: signal.default_int_handler,
                signal.SIGTERM: signal.SIG_DFL,
            }
            for number, default in own.items():
                if signal.getsignal(number) is default:
                    previous[number] = signal.signal(number, self._handle_signal)
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold signals back during the block; after the block, raise a signal that came.

        Blocks may be nested.
        """
        self._held, self._depth = True, self._depth + 1
        try:
            yield
        finally:
            self._depth -= 1
            self._held = self._depth > 0
        if self._waiting is not None and not self._held:
            number, self._waiting = self._waiting, None
            self._raise_signal(number)

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        """Keep the first signal that comes inside of a `held` block; raise a signal elsewhere."""
        if self._held:
            self._waiting = self._waiting or number
        else:
            self._raise_signal(number)

    def _raise_signal(self, number: int) -> None:
        """Raise `SystemExit` or `KeyboardInterrupt`, and hold further signals back."""
        self._held = True
        if number == signal.SIGTERM:
            raise SystemExit(128 + number)
        raise KeyboardInterrupt
