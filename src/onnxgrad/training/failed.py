"""The step that gave NaN or infinity, for a look at what went wrong."""

from __future__ import annotations

import numpy as np
from onnx import ModelProto

from onnxgrad.model.convert import to_proto
from onnxgrad.runtime.session import session
from onnxgrad.runtime.values import to_numpy
from onnxgrad.training.loop import Loop
from onnxgrad.training.setup import Setup

Arrays = dict[str, np.ndarray]


def failed_step(setup: Setup, loop: Loop) -> tuple[ModelProto, Arrays] | None:
    """Return the model of the step that failed, and its inputs; None if none did.

    Of several processes that share the step, each returns that of its own rows; None if it does not
    have all slots, if its statistics are those of all rows, or if its own step is finite.
    """
    if loop.failed is None or loop.runner.step.owners or setup.plan.across is not None:
        return None
    piece, rates, position = loop.failed
    runner = loop.runner
    step = setup.step(setup.objective(), norms=False, in_place=False, blocks=not runner.in_place)
    model = to_proto(step.model)
    running = session(model, setup.trainer.device, step.work, step.recomputes)
    names = [x.name for x in running.get_inputs()]
    states = [to_numpy(state) for state in runner.states(piece)]
    fed = runner.fed(piece, rates, position)[: len(names) - len(states)]  # without the share
    for batch in range(piece.batches):
        values = [*states, *(np.asarray(stack[batch]) for stack in fed)]
        arrays = dict(zip(names, values, strict=True))
        results = running.run(None, arrays)
        if not all(np.isfinite(y).all() for y in results):
            return model, arrays
        states = results[: len(states)]
    return None
