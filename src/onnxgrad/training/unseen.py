"""Epochs that one call of the runtime may run, since nothing looks at the state between them."""

from __future__ import annotations

from typing import Any

from onnxgrad.training.batches import ArraySource
from onnxgrad.training.run.runner import Runner
from onnxgrad.training.step.inputs import FIRST


def unseen_epochs(loop: Any) -> int:
    """Return how many epochs of a `Loop` the next call may run; up to 1: as any other call.

    Small models take longer to be called than to be trained: for a step of 30 microseconds, an
    epoch of 50 of them takes 1.5 ms, and what is around its call half a millisecond.
    """
    state, source, runner = loop.state, loop.source, loop.runner
    if loop.callbacks.all or loop.evaluate is not None or loop.singly or loop.log_steps:
        return 1
    if type(runner) is not Runner or not isinstance(source, ArraySource):
        return 1  # what freezes members, updates in place, or exchanges values, looks
    step, begun = runner.step, state.position or state.pending
    if begun or step.scaled or FIRST.name in step.inputs.feeds or not loop.rates.steady:
        return 1
    most = min(source.joins, runner.budget() // source.batches)
    return min(most, loop.last_epoch - state.epoch)
