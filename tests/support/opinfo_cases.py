"""The operators of PyTorch's own tests: exported, differentiated, and compared with autograd.

`python tests/support/opinfo_cases.py` examines all of them, which takes an hour, and writes `opinfo.csv`;
the reasons in it are kept.
"""

from __future__ import annotations

import csv
import io
import random
import sys
import warnings
from functools import cache
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import TestCase

import numpy as np
import onnx
import torch
from torch.utils import _pytree as pytree

import onnxgrad as og

if __name__ == "__main__":  # the root of the repository, whose package `tests` is
    sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.support.running import run_named

TABLE = Path(__file__).with_name("opinfo.csv")
EXPORTERS = ("dynamo", "torchscript")
# of the largest element: both sides compute in float32, the exporters with formulas of their own
TOLERANCE = 2e-3
OUTCOMES = {
    "a": "the gradients agree",
    "n": "there is no gradient in PyTorch, or all of it is zero",
    "x": "PyTorch does not export it, or onnxruntime does not run what it exports",
    "f": "the exported model computes something else than PyTorch",
    "r": "the gradient is refused with an error",
    "d": "the gradients differ",
    "?": "a or x, by chance",
}
Outcome = tuple[str, str]  # a letter, and what there is to say


@cache
def torch_operators() -> dict[str, Any]:
    """Return the operators of PyTorch's database that have a gradient for float32, by name."""
    stub = ModuleType("expecttest")  # of which PyTorch's tests have a base class, not used here
    stub.TestCase = TestCase  # type: ignore[attr-defined]
    sys.modules.setdefault("expecttest", stub)
    from torch.testing._internal.common_methods_invocations import op_db

    return {
        op.formatted_name: op
        for op in op_db
        if op.supports_autograd and torch.float32 in op.supported_dtypes("cpu")
    }


def seed_generators() -> None:
    """Let samples and cotangents be the same in each run."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def two_samples(name: str) -> list[Any]:
    """Return the first sample of an operator, and one from the middle of the first twenty."""
    seed_generators()
    first = [
        *islice(torch_operators()[name].sample_inputs("cpu", torch.float32, requires_grad=True), 20)
    ]
    return [first[i] for i in sorted({0, len(first) // 2})]


class OperatorCall(torch.nn.Module):
    """An operator applied to the tensors of a sample; what is no tensor stays as it is."""

    def __init__(self, name: str, sample: Any) -> None:
        super().__init__()
        self.op = torch_operators()[name].op
        self.leaves, self.tree = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        self.places = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)]

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Return new copies of the tensors of the sample, by names of inputs."""
        return {
            f"x{i}": leaf.detach().clone().contiguous().requires_grad_(leaf.requires_grad)
            for i, leaf in enumerate(self.leaves[place] for place in self.places)
        }

    def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        x, arguments, more = pytree.tree_unflatten(leaves, self.tree)
        result = self.op(x, *arguments, **more)
        return [y for y in pytree.tree_leaves(result) if isinstance(y, torch.Tensor)]


def exported_call(call: OperatorCall, exporter: str) -> onnx.ModelProto:
    """Return the model of a call, with the tensors as inputs."""
    tensors = call.tensors
    arguments = tuple(t.detach() for t in tensors.values())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {"dynamo": exporter == "dynamo", "input_names": list(tensors), "verbose": False}
        if options["dynamo"]:
            return torch.onnx.export(call, arguments, **options).model_proto
        file = io.BytesIO()
        torch.onnx.export(call, arguments, file, **options)
        return onnx.load_model_from_string(file.getvalue())


def examine(name: str, exporter: str) -> list[Outcome]:
    """Return the outcome of each sample of an operator."""
    return [compare_gradients(OperatorCall(name, sample), exporter) for sample in two_samples(name)]


def compare_gradients(call: OperatorCall, exporter: str) -> Outcome:
    """Compare the gradients of a sample with those of autograd."""
    seed_generators()
    try:
        tensors = call.tensors
        outputs = call(*(t.view_as(t) for t in tensors.values()))  # a leaf cannot be written to
        cotangents = [(torch.rand(y.shape) + 0.5).to(y.dtype) for y in outputs]
        gradients = gradients_of_torch(outputs, cotangents, tensors)
    except RuntimeError as e:
        return "n", repr(e)
    if not gradients:
        return "n", ""
    try:
        model = exported_call(call, exporter)
        read = {x.name for x in model.graph.input}
        feed = {x: t.detach().numpy() for x, t in call.tensors.items() if x in read}
        forward = run_named(model, feed)
        pairs = list(zip(forward, outputs, cotangents, strict=True))
    except Exception as e:
        return "x", repr(e)
    for y, theirs, _ in pairs:
        if not is_close(forward[y], theirs):
            return "f", f"{y}: {forward[y]} instead of {theirs}"
    seeds = {
        y: g.numpy().reshape(forward[y].shape) for y, theirs, g in pairs if theirs.requires_grad
    }
    expected = {x: g for x, g in gradients.items() if x in read}
    try:
        made = og.vjp(model, inputs=list(expected), outputs=list(seeds))
        found = run_named(made, feed | {f"{y}_grad": g for y, g in seeds.items()})
    except Exception as e:
        return "r", repr(e)
    for x, theirs in expected.items():
        if not is_close(found[f"{x}_grad"], theirs):
            return "d", f"{x}: {found[f'{x}_grad']} instead of {theirs}"
    return ("a", "") if expected else ("n", "")


def gradients_of_torch(
    outputs: list[torch.Tensor], cotangents: list[torch.Tensor], tensors: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return PyTorch's gradients that are not zero, by input."""
    pairs = [(y, g) for y, g in zip(outputs, cotangents, strict=True) if y.requires_grad]
    wrt = {x: t for x, t in tensors.items() if t.requires_grad}
    if not pairs or not wrt or any(y.is_complex() for y in outputs):
        return {}
    options = {"allow_unused": True, "materialize_grads": True}
    ys, gs = zip(*pairs, strict=True)
    found = torch.autograd.grad(ys, [*wrt.values()], gs, **options)
    return {x: g for x, g in zip(wrt, found, strict=True) if g.any()}


def is_close(ours: Any, theirs: torch.Tensor) -> bool:
    """Return whether two arrays are the same up to rounding."""
    expected = theirs.detach().numpy()
    if np.shape(ours) != expected.shape:
        return expected.size == np.size(ours) == 1 and is_close(
            np.reshape(ours, expected.shape), theirs
        )
    if expected.dtype.kind != "f":
        return bool(np.array_equal(ours, expected))
    finite = np.abs(expected[np.isfinite(expected)])
    limit = TOLERANCE * max(finite.max(initial=0), 0.1)
    return bool(np.allclose(ours, expected, rtol=TOLERANCE, atol=limit, equal_nan=True))


def expected_outcomes() -> dict[str, dict[str, str]]:
    """Return the rows of the table by operator: letters of `OUTCOMES` by exporter, and `why`."""
    with TABLE.open(newline="") as file:
        return {row["operator"]: row for row in csv.DictReader(file)}


def write_table() -> None:
    """Examine all operators, and write the table."""
    old = expected_outcomes() if TABLE.exists() else {}
    with TABLE.open("w", newline="") as file:
        rows = csv.DictWriter(file, ["operator", *EXPORTERS, "why"], lineterminator="\n")
        rows.writeheader()
        for name in sorted(torch_operators()):
            row = {e: "".join(letter for letter, _ in examine(name, e)) for e in EXPORTERS}
            rows.writerow({"operator": name, **row, "why": old.get(name, {}).get("why", "")})


if __name__ == "__main__":
    write_table()
