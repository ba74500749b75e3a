"""Models of sounds: inputs, states and windows; streams of files that carry states on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

import onnxgrad as og
from onnxgrad.model.feeds import inputs_without_default
from onnxgrad.runtime.predictor import Predictor
from onnxgrad.tasks.base import softmax

Shape = tuple[int | str | None, ...]


def _dtypes_and_shapes(listed: Any) -> dict[str, tuple[np.dtype, Shape]]:
    """Return `{name: (dtype, shape)}` of inputs or outputs; a dimension is an int or a symbol."""
    tensors: list[ir.Value] = [ir.from_proto(proto) for proto in listed]
    return {
        str(x.name): (x.dtype.numpy(), tuple(d if isinstance(d, int) else d.value for d in x.shape))
        for x in tensors
        if x.dtype is not None and x.shape is not None
    }


class SoundModel:
    """A sound model with its inputs and states, which is run on windows of waveforms.

    Args:
        proto: the model.
        options: has the arguments of `Sound` as attributes.
    """

    def __init__(self, proto: onnx.ModelProto, options: Any) -> None:
        self.rate, self.front, self.context = options.rate, options.front, options.context
        self.carry, constants = dict(options.carry or {}), options.constants or {}
        carry, states = self.carry, self.carry.values()
        inputs = _dtypes_and_shapes(inputs_without_default(proto))
        outputs = _dtypes_and_shapes(y for y in proto.graph.output if y.name not in states)
        for name in carry:
            if name not in inputs:
                raise ValueError(
                    f"carry= names {name!r}, which is no input of the model: name inputs of "
                    f"{list(inputs)}"
                )
        others = {n: v for n, v in inputs.items() if n not in carry and n not in constants}
        self.input = _float_tensor_name("input of sounds", others, None)
        self.output = _float_tensor_name("output", outputs, options.output)
        self.single = len(proto.graph.output) == 1
        self.shape, self.out = inputs[self.input][1], outputs[self.output][1]
        self.states = {name: inputs[name] for name in carry}
        self.constants = {
            n: np.asarray(constants.get(n, self.rate), dtype)
            for n, (dtype, shape) in inputs.items()
            if n in constants or (shape == () and n == "sr")
        }
        if unknown := set(inputs) - {self.input, *carry, *self.constants}:
            raise ValueError(
                f"the inputs {sorted(unknown)} of the model have no values: pass them as constants="
            )
        self.units = self.out[-1] if len(self.out) > 1 else 1
        self.samples = self._window_length(options.seconds)
        self.rows = self.shape[0] if isinstance(self.shape[0], int) else None
        self.activation = "none" if og.losses.are_probabilities(proto, self.output) else None

    def _window_length(self, seconds: float | None) -> int:
        stated = self.shape[-1]
        asked = None if seconds is None else round(seconds * self.rate)
        if self.front is None and isinstance(stated, int):
            if asked not in (None, stated - self.context):
                raise ValueError(
                    f"seconds={seconds} are {asked} samples, and the input {self.input!r} takes "
                    f"{stated}, of which {self.context} are context: leave out seconds="
                )
            asked = stated - self.context
        if asked is None or asked < 1:
            raise ValueError(
                f"the input {self.input!r} has the shape {self.shape}, which does not say how long "
                "a window is: pass seconds="
            )
        return asked

    @property
    def batches_along_file(self) -> bool:
        """Whether a batch is consecutive windows of one file, as the model's states have no row
        axis.
        """
        own = [shape for _, shape in self.states.values()]
        return bool(own) and self.rows is None and not any(self.shape[0] in s for s in own)

    def zero_states(self, rows: int) -> dict[str, np.ndarray]:
        """Return `{state: zeros}`, the model's states at the beginning of `rows` files."""
        return {
            name: np.zeros([d if isinstance(d, int) else rows for d in shape], dtype)
            for name, (dtype, shape) in self.states.items()
        }

    def model_inputs(self, waves: np.ndarray) -> dict[str, np.ndarray]:
        """Return `{input: array}` for windows (N, samples), with zeros as states.

        Raises:
            ValueError: the features do not have the shape of the input.
        """
        x = waves if self.front is None else np.asarray(self.front(waves), np.float32)
        for y in (x, x.swapaxes(-1, -2)) if x.ndim > 2 else (x,):
            if y.ndim + 1 == len(self.shape):
                y = np.expand_dims(y, 1 if self.shape[1] == 1 else -1)
            pairs = zip(y.shape[1:], self.shape[1:], strict=False)
            if y.ndim == len(self.shape) and all(
                n == d or not isinstance(d, int) for n, d in pairs
            ):
                return {self.input: y, **self.constants, **self.zero_states(len(y))}
        raise ValueError(
            f"{'windows have' if self.front is None else 'front returns'} the shape {x.shape}, "
            f"which does not fit the shape {self.shape} of the input {self.input!r}: pass front= "
            "that returns this shape"
        )

    def cut_windows(self, x: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return windows (count, context + samples) of a waveform, and their start samples.

        The last one ends with the waveform, or of a model with states, in zeros.
        """
        count = max(1, -(-(len(x) - self.samples) // step) + 1)
        starts, size = np.arange(count) * step, self.context + self.samples
        if not self.carry:
            starts = np.minimum(starts, max(0, len(x) - self.samples))
        padded = np.zeros(starts[-1] + size, np.float32)
        padded[self.context :][: len(x)] = x
        return np.lib.stride_tricks.sliding_window_view(padded, size)[starts], starts

    def window_scores(
        self, predictor: Predictor, windows: np.ndarray, activation: Any
    ) -> np.ndarray:
        """Return probabilities (windows, classes); states pass from each batch to the next."""
        size = 1 if self.carry and not self.batches_along_file else self.rows or 64
        state, found = self.zero_states(self.rows or 1), []
        for at in range(0, len(windows), size):
            x = windows[at : at + size]
            count = len(x)
            if self.rows:
                x = np.resize(x, (self.rows, x.shape[1]))
            feed = {**self.model_inputs(np.ascontiguousarray(x)), **state}
            y, *new = predictor.run(feed, [self.output, *self.carry.values()])
            state = dict(zip(self.carry, new, strict=True))
            found.append(y.reshape(len(x), -1)[:count])
        y = np.concatenate(found)
        if activation == "sigmoid":
            return 1 / (1 + np.exp(-y))
        if activation == "softmax":
            return softmax(y)
        if y.min() < 0 or y.max() > 1.0001:
            raise ValueError(
                f"the output {self.output!r} holds {y.min()} to {y.max()}, which are no "
                "probabilities: pass activation='sigmoid' or 'softmax'"
            )
        return y


def _float_tensor_name(
    what: str, found: Mapping[str, tuple[np.dtype, Shape]], chosen: str | None
) -> str:
    """Return `chosen` if it is in `found`, or else the name of the only float tensor in `found`."""
    names = [n for n, (dtype, shape) in found.items() if dtype.kind == "f" and shape]
    if chosen in names:
        return str(chosen)
    if chosen is not None or len(names) != 1:
        raise ValueError(
            f"the {what} must be one float tensor of the model, and {names} may be it: name an "
            "output with output=; name states in carry=, and other inputs in constants="
        )
    return names[0]


class WindowStreams(og.data.Reader):
    """A reader of files cut into consecutive windows, with several files side by side in a batch.

    Files of similar length share their batches; shorter ones end in windows of weight zero. A seed
    changes the order of such groups. A group begins with the states in its data.

    Args:
        folder: the clips, which are the labeled parts of files.
        windows: returns windows (count, samples) and labels (count, ...) of the clips of a file,
            for a generator or None.
        task: of `Sound`, with the number of `files` side by side. Where no state has rows, the
            rows of a batch are consecutive windows of one file instead.
    """

    sequences = True

    def __init__(
        self,
        folder: Any,
        windows: Callable[[list, np.random.Generator | None], tuple[np.ndarray, np.ndarray]],
        task: Any,
    ) -> None:
        self.folder, self.windows = folder, windows
        self.model_inputs = task.form.model_inputs
        self.batches_along_file = task.form.batches_along_file
        self.width = task.files if task.form.rows is None else task.form.rows
        files: dict[Any, list] = defaultdict(list)
        for clip in folder.clips:
            files[clip.file].append(clip)
        self.files = list(files.values())
        self.counts = [-(-folder.count_file_samples(file) // folder.samples) for file in files]
        order = sorted(range(len(self.files)), key=lambda i: self.counts[i])
        size = 1 if self.batches_along_file else min(self.width, len(order))
        self.groups = [order[i : i + size] for i in range(0, len(order), size)]
        self.count = sum(self._count_steps_of_files(group) for group in self.groups)

    def _count_steps_of_files(self, group: list[int]) -> int:
        longest = max(self.counts[i] for i in group)
        return -(-longest // self.width) if self.batches_along_file else longest

    def batches(self, size: int, seed: int | None, skip: int) -> Iterator[Any]:
        """Yield the batches of one pass; the batch size is fixed, and `size` has no effect."""
        order = np.arange(len(self.groups))
        if seed is not None:
            order = np.random.default_rng(seed).permutation(order)
        for group in (self.groups[i] for i in order):
            if skip >= (steps := self._count_steps_of_files(group)):
                skip -= steps
                continue
            if not skip and group is not self.groups[order[0]]:
                yield None
            yield from self._batches_of_files(group, seed, skip)
            skip = 0

    def _batches_of_files(self, group: list[int], seed: int | None, skip: int) -> Iterator[Any]:
        read = []
        for i in group:
            rng = None if seed is None else np.random.default_rng([seed, i])
            read.append(self.windows(self.files[i], rng))
        if self.batches_along_file:
            ((x, y),) = read
            for at in range(skip * self.width, len(x), self.width):
                rows = slice(at, at + self.width)
                yield self.model_inputs(x[rows]), y[rows], np.ones(len(y[rows]), np.float32)
            return
        # all batches have the same number of rows
        sides = [read[i % len(read)] for i in range(len(self.groups[0]))]
        for t in range(skip, self._count_steps_of_files(group)):
            own = [min(t, len(y) - 1) for _, y in sides]
            weight = [i < len(read) and t < len(y) for i, (_, y) in enumerate(sides)]
            x, y = (
                np.stack([side[k][at] for side, at in zip(sides, own, strict=True)]) for k in (0, 1)
            )
            yield self.model_inputs(x), y, np.asarray(weight, np.float32)

    def describe(self) -> dict[str, Any]:
        """Return the batch count, and a digest of the clips and their files."""
        digest = self.folder.describe()["digest"]
        return {"kind": "streams", "count": self.count, "width": self.width, "digest": digest}
