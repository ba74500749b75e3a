"""The float constants of a model, each with the verdict on its role."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.autodiff.primal.defaults import close_defaults
from onnxgrad.autodiff.primal.local_functions import inlined
from onnxgrad.model import external, weights as constants
from onnxgrad.model.convert import to_ir
from onnxgrad.model.feeds import unsized_defaults
from onnxgrad.training.parameters import evidence
from onnxgrad.training.parameters.roles import Roles, Verdict
from onnxgrad.training.parameters.table import Tensor, Tensors


def judge(proto: ModelProto) -> tuple[ir.Graph, Tensors]:
    """Return the graph of `proto`, functions inlined, and its float constants in their order."""
    inner = to_ir(inlined(external.without_data(proto), lifted=True))
    external.with_data(inner, proto)
    close_defaults(inner)
    values = inner.graph.initializers
    stated = evidence.stated_kinds(proto.graph)
    buffers = [values[n] for n, parameter in stated.items() if not parameter and n in values]
    roles = Roles(inner.graph, proto.producer_name, buffers)
    noted, data = constants.noted(proto), unsized_defaults(proto)
    rows = Tensors()
    for ref in constants.constant_refs(proto):
        if ref.read().data_type in constants.FLOATS:
            array, value = ref.array(), values.get(ref.name)
            if ref.name in noted:
                verdict = Verdict(False, "part of a loss or of a gradient")
            elif not array.size:
                verdict = Verdict(False, "it has no elements: a place for an adapter")
            elif ref.name in data:
                verdict = Verdict(False, "an input, in whose place another length can be fed")
            elif value is None:
                verdict = Verdict(False, "no node reads it")
            else:
                by_role = roles.judge(ref.name, value, array)
                verdict = _verdict_of_exporter(by_role, array, stated.get(ref.name))
            of_role = verdict.trains, verdict.why, verdict.doubtful
            rows.append(Tensor(ref.name, array.shape, str(array.dtype), array.size, *of_role))
    return inner.graph, rows


def _verdict_of_exporter(verdict: Verdict, array: np.ndarray, parameter: bool | None) -> Verdict:
    """Return the verdict of the role, or of the exporter if it states what the tensor is."""
    if parameter is False and verdict.trains:
        return Verdict(False, f"a buffer, as its exporter states ({verdict.why})")
    if parameter and not verdict.trains and not verdict.certain and np.isfinite(array).all():
        why = f"a parameter, as its exporter states ({verdict.why})"
        return Verdict(True, why, array.size == 1)
    if parameter is False:
        return Verdict(False, verdict.why)
    return verdict
