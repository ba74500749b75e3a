"""Sessions on devices whose kernels may be missing or wrong: some runs are checked by the CPU.

Execution providers other than those of onnxruntime's own CUDA and CPU builds fail on some operators
when these run, and compute some wrongly without an error. `CheckedSession` compares the first run
with the CPU, and some later runs. If a run differs, `compare_nodes` runs each node alone, and the
nodes that fail or differ are assigned to the CPU.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import ModelProto, NodeProto

from onnxgrad.errors import ProviderError, argument, escaping, first_line, join_first, printable
from onnxgrad.model.external import tensor_to_array
from onnxgrad.model.rewrites import densify_subgraphs
from onnxgrad.model.traversal import subgraphs
from onnxgrad.reporting import frames_inside
from onnxgrad.runtime.device import CPU
from onnxgrad.runtime.node_runs import NodeRuns, node_title
from onnxgrad.runtime.values import to_ortvalue

_LIMIT = 0.01  # of a difference from the CPU, as a share of the norm of a result
_ROUNDING = 1e-3  # relative rounding of a device that computes in 16 bits
_NODE_ROUNDING = 1e-5  # of elements of the result of one node, relative to its largest operand
_NOISE = 8  # relative noise of operands, in units of the last place
_REASON = 160  # characters of onnxruntime's message
_SMALL = 64  # elements of a constant whose values are compared
_NUMPY_TYPES = "float double float16 bool int8 int16 int32 int64 uint8 uint16 uint32 uint64"
_COMPARED = {f"tensor({name})" for name in _NUMPY_TYPES.split()}
# the entry of a session's configuration by which onnxruntime assigns annotated nodes
_ASSIGNMENT, _ANNOTATION, _ON_CPU = "session.layer_assignment_settings", "layer_ann", "on_cpu"

Values = Mapping[str, ort.OrtValue]
Results = Sequence[ort.OrtValue]


class CheckedSession:
    """A session on a device, of which some runs are compared with runs of the model on the CPU.

    These are the first run, and the 10th, 100th, 1000th and so on: weights that begin as zeros hide
    mistakes in the first. Where a run fails or differs, nodes that fail or differ when they run
    alone are assigned to the CPU, with a warning that names them. A result may differ by one
    percent, and by what rounding operands to 16 bits could change; so a model that draws random
    numbers always passes.

    Tensors of calls are in the memory of the CPU.

    Attributes:
        model: the model, whose nodes are annotated that are assigned to the CPU.
        configuration: the entries of a session's configuration that assign them.
        moved: these nodes.

    Args:
        model: the model.
        device: the name of the device, for messages.
        open_session: returns a session on the device, for a model and entries of its
            configuration.
        open_reference: returns a session for a model on the CPU.

    Raises:
        ProviderError: onnxruntime cannot start the provider.
        Exception: the model does not run on the CPU either, as onnxruntime reports.
    """

    def __init__(
        self,
        model: ModelProto,
        device: str,
        open_session: Callable[..., ort.InferenceSession],
        open_reference: Callable[[ModelProto], ort.InferenceSession],
    ) -> None:
        self.model, self._device = densify_subgraphs(model), device
        self.configuration, self.moved = dict[str, str](), list[NodeOnDevice]()
        self._open_session, self._open_reference = open_session, open_reference
        self._runs, self._checked_run = 0, 1  # the count of runs, and the run to compare next
        self._session, self._opening_error = open_reference(self.model), None
        try:
            self._session = open_session(self.model)
        except ProviderError:
            raise
        except Exception as e:  # onnxruntime's errors have no common base
            self._opening_error = e

    def __getattr__(self, name: str) -> Any:
        """Return what onnxruntime's session has, such as `get_inputs`."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._session, name)

    def run(
        self,
        output_names: Sequence[str] | None,
        input_feed: Mapping[str, Any],
        run_options: Any = None,
    ) -> list[Any]:
        """Return the outputs of one call, as `InferenceSession.run`."""
        if self._counts_to_check():
            arrays = {x.name: np.asarray(input_feed[x.name], order="C") for x in self.get_inputs()}
            self._check_run({name: to_ortvalue(a, CPU) for name, a in arrays.items()})
        return self._session.run(output_names, input_feed, run_options)

    def run_with_ort_values(
        self, output_names: Sequence[str], input_dict: Values, run_options: Any = None
    ) -> list[ort.OrtValue]:
        """Return the outputs of one call, as `InferenceSession.run_with_ort_values`."""
        if self._counts_to_check():
            self._check_run(input_dict)
        return self._session.run_with_ort_values(output_names, input_dict, run_options)

    def io_binding(self) -> HostBinding:
        """Return an object that takes inputs and outputs as onnxruntime's `IOBinding`."""
        return HostBinding()

    def run_with_iobinding(self, binding: HostBinding, run_options: Any = None) -> None:
        """Run the session on the inputs of a binding, which gets the results."""
        names = list(binding.places)
        binding.set_results(self.run_with_ort_values(names, binding.inputs, run_options))

    # -- comparisons --------------------------------------------------------------------------

    def _counts_to_check(self) -> bool:
        """Count a run, and return whether it is compared with the CPU."""
        self._runs += 1
        is_checked = self._runs == self._checked_run
        self._checked_run *= 10 if is_checked else 1
        return is_checked

    @escaping()
    def _check_run(self, feed: Values) -> None:
        """Compare the outputs for `feed` with the CPU, and assign nodes to the CPU as necessary.

        Raises:
            ProviderError: the outputs differ, though no node differs when it runs alone.
        """
        reference = self._open_reference(self.model)
        names = [y.name for y in reference.get_outputs()]
        expected = reference.run_with_ort_values(names, feed)
        noisy = reference.run_with_ort_values(
            names, {name: _with_noise(value) for name, value in feed.items()}
        )
        del reference
        if fault := self._fault_of_run(names, feed, expected, noisy):
            compared = compare_nodes(self.model, feed, self._open_session, self._open_reference)
            faulty = [*self.moved, *(node for node in compared if node.fault)]
            if moved := list({node.index: node for node in faulty}.values()):
                self._assign_to_cpu(moved)
                fault = self._fault_of_run(names, feed, expected, noisy)
            if fault:
                raise ProviderError(
                    f"the device {self._device!r} does not compute this model as the CPU does: "
                    f"{fault}. Use {argument('device', 'cpu')}, or another version of the provider"
                )
            listed = join_first([f"{node.title}: {node.fault}" for node in moved], 3, "; ")
            warnings.warn(
                f"the device {self._device!r} cannot compute {len(moved)} node"
                f"{'s' * (len(moved) > 1)}, which the CPU computes: {listed}",
                stacklevel=frames_inside() + 1,
            )

    def _assign_to_cpu(self, nodes: Sequence[NodeOnDevice]) -> None:
        """Open the session anew, in which the CPU computes `nodes`."""
        model = ModelProto()
        model.CopyFrom(self.model)
        for node in nodes:
            _annotate_for_cpu(model.graph.node[node.index])
        self.model, self.moved = model, list(nodes)
        self.configuration, self._opening_error = {_ASSIGNMENT: f"cpu({_ON_CPU})"}, None
        try:
            self._session = self._open_session(model, self.configuration)
        except Exception as e:  # onnxruntime's errors have no common base
            self._opening_error = e

    def _fault_of_run(
        self, names: Sequence[str], feed: Values, expected: Results, noisy: Results
    ) -> str | None:
        """Return what is wrong with a run on the device; None if the outputs are as expected.

        `expected` has the outputs of the CPU, and `noisy` those for operands with small noise.
        """
        if self._opening_error is not None:
            return _error_reason(self._opening_error)
        try:
            found = self._session.run_with_ort_values(names, feed)
        except Exception as e:  # onnxruntime's errors have no common base
            return _error_reason(e)
        for name, y, like, other in zip(names, found, expected, noisy, strict=True):
            if _is_comparable(like):
                noise = _noise_of_rounding(like.numpy(), other.numpy())
                if (difference := _difference_text(y.numpy(), like.numpy(), noise)) is not None:
                    return f"the output {printable(name)!r} differs by {difference}"
        return None


class HostBinding:
    """Inputs and outputs of a session in the memory of the CPU, with the methods of `IOBinding`.

    Attributes:
        inputs: the bound inputs, by name.
        places: the arrays into which outputs are written, by name; None: new memory.
    """

    def __init__(self) -> None:
        self.inputs: dict[str, ort.OrtValue] = {}
        self.places: dict[str, np.ndarray | None] = {}
        self._results: list[ort.OrtValue] = []

    def bind_cpu_input(self, name: str, array: np.ndarray) -> None:
        """Bind an input to an array."""
        self.inputs[name] = to_ortvalue(array, CPU)

    def bind_ortvalue_input(self, name: str, value: ort.OrtValue) -> None:
        """Bind an input to an OrtValue."""
        self.inputs[name] = value

    def bind_input(
        self, name: str, device: str, number: int, dtype: Any, shape: Sequence[int], address: int
    ) -> None:
        """Bind an input to the memory at an address."""
        self.bind_cpu_input(name, _array_at(address, shape, dtype))

    def bind_output(
        self,
        name: str,
        device: str = "cpu",
        number: int = 0,
        dtype: Any = None,
        shape: Sequence[int] = (),
        address: int | None = None,
    ) -> None:
        """Bind an output to the memory at an address, or to new memory."""
        self.places[name] = None if address is None else _array_at(address, shape, dtype)

    def clear_binding_outputs(self) -> None:
        """Forget the outputs."""
        self.places.clear()

    def set_results(self, results: Sequence[ort.OrtValue]) -> None:
        """Take the results of a run, in the order of the outputs, and write them to their places.

        Raises:
            ValueError: a result has another shape than the memory for it.
        """
        self._results = list(results)
        for i, place in enumerate(self.places.values()):
            if place is not None:
                np.copyto(place, self._results[i].numpy())
                self._results[i] = to_ortvalue(place, CPU)

    def get_outputs(self) -> list[ort.OrtValue]:
        """Return the results of the last run, in the order of the outputs."""
        return self._results


# -- each node alone -------------------------------------------------------------------------------


@dataclass(frozen=True)
class NodeOnDevice:
    """A node that ran alone on a device, with the operands that it has on the CPU.

    Attributes:
        index: the number of the node in the graph.
        title: operator, name and output, for messages.
        fault: onnxruntime's error, or how far a result is from the CPU; None: there is no fault.
    """

    index: int
    title: str
    fault: str | None


def compare_nodes(
    model: ModelProto,
    feed: Values,
    open_session: Callable[[ModelProto], ort.InferenceSession],
    open_reference: Callable[[ModelProto], ort.InferenceSession],
) -> list[NodeOnDevice]:
    """Return for each node of a graph whether it runs alone on a device as on the CPU.

    A node that computes the same as an earlier node, with operands of the same shapes, is not run
    again. A node with subgraphs is run as a whole.

    Args:
        model: model whose subgraphs have dense constants; never modified.
        feed: its inputs.
        open_session: returns a session for a model on the device.
        open_reference: returns a session for a model on the CPU.
    """
    runs, found = NodeRuns(model, feed, open_reference), list[NodeOnDevice]()
    faults: dict[bytes, str | None] = {}
    for piece in runs.run_pieces():
        for i in piece:
            if (key := _computation_key(runs, i)) not in faults:
                faults[key] = _node_fault(runs, runs.nodes[i], open_session)
            found.append(NodeOnDevice(i, node_title(runs.nodes[i]), faults[key]))
    return found


def _computation_key(runs: NodeRuns, index: int) -> bytes:
    """Return bytes that are equal for nodes which compute the same for operands of equal shapes."""
    node, alike = runs.nodes[index], NodeProto()
    alike.CopyFrom(node)
    alike.name = ""
    del alike.metadata_props[:]
    if index not in runs.with_subgraphs:  # the names of values say only which are the same
        numbers = {name: str(i) for i, name in enumerate([*node.input, *node.output]) if name}
        alike.input[:] = [numbers.get(x, "") for x in node.input]
        alike.output[:] = [numbers.get(y, "") for y in node.output]
    operands = list[Any]()
    for name in runs.reads[index]:
        if name in runs.initializers:  # axes and lengths decide what a node computes
            array = tensor_to_array(runs.initializers[name])
            decides = array.dtype.kind != "f" and array.size <= _SMALL
            operands.append((array.dtype, array.shape, array.tobytes() if decides else b""))
        elif (value := runs.values[name]).is_tensor():
            operands.append((value.data_type(), value.shape()))
    return alike.SerializeToString(deterministic=True) + repr(operands).encode()


def _node_fault(
    runs: NodeRuns, node: NodeProto, open_session: Callable[[ModelProto], ort.InferenceSession]
) -> str | None:
    """Return what is wrong with one node on a device; None if it computes as on the CPU."""
    names = [y for y in node.output if y]
    model = runs.model_of_nodes([node], names)
    feed = {x.name: runs.values[x.name] for x in model.graph.input}
    try:
        found = open_session(model).run_with_ort_values(names, feed)
    except Exception as e:  # onnxruntime's errors have no common base
        return _error_reason(e)
    operands = [np.abs(v.numpy()) for v in feed.values() if _is_comparable(v)]
    largest = max((float(x.max(initial=0)) for x in operands if x.dtype.kind == "f"), default=0.0)
    for name, y in zip(names, found, strict=True):
        if _is_comparable(runs.values[name]):
            expected = runs.values[name].numpy()
            noise = _NODE_ROUNDING * largest * expected.size**0.5
            if (difference := _difference_text(y.numpy(), expected, noise)) is not None:
                return f"its result {printable(name)!r} differs from the CPU's by {difference}"
    return None


# -- differences -----------------------------------------------------------------------------------


def _is_comparable(value: ort.OrtValue) -> bool:
    """Return whether a value is a tensor of numbers or booleans that numpy has."""
    return value.is_tensor() and value.data_type() in _COMPARED


def _difference_text(y: np.ndarray, expected: np.ndarray, noise: float) -> str | None:
    """Return how far a result is from the expected result; None if it is near enough.

    `noise` is the norm of a difference of floats that is allowed beside `_LIMIT`.
    """
    if y.shape != expected.shape:
        return f"its shape, {list(y.shape)} instead of {list(expected.shape)}"
    if expected.dtype.kind != "f":
        count = int((y != expected).sum())
        return f"{count} of {y.size} elements" if count > max(1, _LIMIT * y.size) else None
    wide, like = y.astype(np.float64), expected.astype(np.float64)
    finite = np.isfinite(like)
    if not np.array_equal(finite, np.isfinite(wide)):
        return "elements that are not finite"
    norm = float(np.linalg.norm(like[finite]))
    error = float(np.linalg.norm(wide[finite] - like[finite]))
    return f"{error / (norm or 1.0):.2g} of its norm" if error > _LIMIT * norm + noise else None


def _noise_of_rounding(y: np.ndarray, noisy: np.ndarray) -> float:
    """Return the norm by which rounding of the operands to 16 bits may change the result `y`.

    `noisy` is the result for operands with small noise: see `_with_noise`.
    """
    if y.dtype.kind != "f" or y.shape != noisy.shape:
        return 0.0
    change = noisy.astype(np.float64) - y.astype(np.float64)
    ratio = max(1.0, _ROUNDING / (_NOISE * float(np.finfo(y.dtype).eps)))
    return ratio * float(np.linalg.norm(change[np.isfinite(change)]))


def _with_noise(value: ort.OrtValue) -> ort.OrtValue:
    """Return a value of floats with noise of a few units in the last place; any other unchanged."""
    if not _is_comparable(value) or (array := value.numpy()).dtype.kind != "f":
        return value
    noise = np.random.default_rng(0).standard_normal(array.shape)
    noisy = array * (1 + _NOISE * np.finfo(array.dtype).eps * noise)
    return to_ortvalue(noisy.astype(array.dtype), CPU)


def _error_reason(error: Exception) -> str:
    """Return the end of the first line of onnxruntime's message, in front of which it names the
    node and its own functions.
    """
    text = first_line(error).rpartition("Status Message: ")[2]
    return text if len(text) <= _REASON else f"... {text[-_REASON:]}"


# -- the memory of arrays, and nodes ---------------------------------------------------------------


def _array_at(address: int, shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Return an array of the memory at an address, which it does not keep alive."""
    kind = np.dtype(dtype)
    memory = (ctypes.c_char * (prod(shape) * kind.itemsize)).from_address(address)
    return np.frombuffer(memory, kind).reshape(shape)


def _annotate_for_cpu(node: NodeProto) -> None:
    """Annotate a node and the nodes of its subgraphs for the assignment to the CPU."""
    node.metadata_props.add(key=_ANNOTATION, value=_ON_CPU)
    for graph in subgraphs(node):
        for inner in graph.node:
            _annotate_for_cpu(inner)
