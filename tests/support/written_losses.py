"""Losses as trainers write them into a graph, with their gradient, computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxgrad.autodiff.primal.prepare import prepare
from onnxgrad.autodiff.reverse import sweep
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.infer import infer
from onnxgrad.graph.tidy import tidy
from onnxgrad.model.convert import to_proto
from tests.support.running import session_of

TYPES = {"int64": np.int64, "float": np.float32, "double": np.float64, "float16": np.float16}


def run_cast(model: onnx.ModelProto, feed: Mapping[str, Any]) -> list[np.ndarray]:
    """Return the outputs for arrays that are cast to the types of the inputs."""
    session = session_of(model)
    kinds = {x.name: x.type.removeprefix("tensor(").rstrip(")") for x in session.get_inputs()}
    cast = {n: np.asarray(feed[n], TYPES.get(kind, bool)) for n, kind in kinds.items()}
    return session.run(None, cast)


def torch_leaf(value: np.ndarray) -> Any:
    """Return a tensor of PyTorch that gets a gradient."""
    import torch

    return torch.tensor(value, requires_grad=True)


class WrittenLoss:
    """The total of a loss, its gradient with respect to one value, and the counts.

    Attributes:
        written: what the objective wrote.
        total, gradient, counts: the results for the arrays of `feed`.
    """

    def __init__(self, proto, objective, feed, *, weighted=False, wrt="x"):
        names = objective.outputs(proto)
        self._prepared = prepared = prepare(proto)
        graph, op = prepared.graph, Emit(prepared.graph)
        values = ir.convenience.create_value_mapping(graph, include_subgraphs=False)
        self.written = written = objective.write(op, {n: values[n] for n in names}, weighted)
        graph.inputs.extend([*written.labels, *([written.weight] if weighted else [])])
        with op:
            pairs = list(zip(written.factors, written.counts, strict=True))
            scales = [factor / count for factor, count in pairs]
            parts = [s * total for s, total in zip(scales, written.sums, strict=True)]
            total = op.total([op.Cast(part, to=parts[0].dtype) for part in parts])
            gradient = sweep(op, written.initial_cotangents(op, scales), [values[wrt]])[values[wrt]]
            outputs = [op.copy_of(v) for v in (total, gradient, *written.counts)]
        graph.outputs[:] = outputs
        tidy(prepared)
        infer(prepared)
        self.model, self._feed = to_proto(prepared), feed
        self.total, self.gradient, *self.counts = run_cast(self.model, feed)
        assert self.total.shape == ()

    def check_counts_alone(self) -> None:
        """Check that counts need labels and weights only, no forward pass."""
        graph = self._prepared.graph
        graph.outputs[:] = graph.outputs[2:]
        tidy(self._prepared)
        x = graph.inputs[0]
        assert not list(x.uses())
        graph.inputs.remove(x)
        alone = run_cast(to_proto(self._prepared), self._feed)
        np.testing.assert_array_equal(alone, self.counts)

    def check(self, expected, leaf, rtol: float = 1e-10) -> None:
        """Compare with a scalar of PyTorch computed from the tensor `leaf`."""
        expected.backward()
        np.testing.assert_allclose(self.total, expected.item(), rtol=rtol, atol=1e-12)
        np.testing.assert_allclose(self.gradient, leaf.grad.numpy(), rtol=rtol, atol=1e-12)
