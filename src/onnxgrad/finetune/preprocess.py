"""`preprocess`: transforms of images or waveforms in front of a model."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.data import image_nodes
from onnxgrad.data.audio import WaveformTransform
from onnxgrad.data.image_transforms import (
    IMAGES,
    Normalize,
    adapt_transform,
    check_normalize_is_last,
)
from onnxgrad.data.images import ImageFolder, layout_and_channels
from onnxgrad.errors import argument, printable, unknown
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.infer import infer
from onnxgrad.graph.tidy import tidy
from onnxgrad.model.constants import normalize_domain
from onnxgrad.model.convert import to_proto
from onnxgrad.model.feeds import inputs_without_default
from onnxgrad.model.local_functions import raise_opset
from onnxgrad.model.notes import write_metadata
from onnxgrad.model.read import ModelLike, read
from onnxgrad.model.scopes import free_name
from onnxgrad.model.traversal import value_names
from onnxgrad.operators import shapes

# metadata by which PyTorch's exporter says that a constant is no parameter: `trainable` reads it
_KIND, _BUFFER = "pkg.torch.export.graph_signature.InputSpec.kind", "BUFFER"


def preprocess(
    model: ModelLike,
    transforms: Sequence[Any] | ImageFolder,
    input: str | None = None,
    *,
    size: int | tuple[int, int] | None = None,
    layout: str | None = None,
    dtype: Any = None,
    name: str | None = None,
) -> ModelProto:
    """Return `model` with `transforms` in front of an input, as nodes: it then takes raw input.

    - Images are uint8 (N, height, width, channels) of any size, one size for a batch. The result
      equals, to one level of 255, the images that `image_folder` with these transforms feeds the
      model in evaluations: random transforms crop at the center or do nothing, images are resized
      and cropped to the size of the input at the end, and values are from 0 to 1 before
      `normalize`.
    - Waveforms are float32 (N, samples). The result equals the arrays that the transforms return.

    The new constants do not train by default; other tensors keep their names, so that the model can
    be trained further. Its opset is at least 18.

    Args:
        model: model, serialized model or path; never modified.
        transforms: of images (`resize`, `center_crop`, `normalize`) or of waveforms (`resample`,
            `mel_spectrogram`), or your own with a method `write(op, x)`, which writes nodes and
            returns their result; or what `image_folder` returned, for its transforms, size and
            scale.
        input: name of the input that is replaced; None if there is one.
        size: height and width behind the transforms, if the input does not state them.
        layout: "NCHW" or "NHWC", if the input does not say where the channels are.
        dtype: of waveforms: "float32" (default), or "int16", which is divided by 32768. With it,
            transforms of your own are of waveforms.
        name: name of the new input; None: "image" or "waveform".

    Raises:
        ValueError: an unknown input, transforms that have no nodes or do not fit together or the
            input, or a name that is taken.
        ModelError: `model` cannot be read, or not be converted to opset 18.

    Examples:
        >>> import onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]> f (float[N,3,8,8] x) => (float[N,3,8,8] y)
        ...     { y = Relu(x) }''')
        >>> raw = og.graph.preprocess(model, [og.data.resize(10), og.data.center_crop(8)])
        >>> print(og.plot.onnx_text_plot_io(raw).splitlines()[1])
        input: name='image' type=dtype('uint8') shape=('N', 'height', 'width', 3)
    """
    if isinstance(transforms, ImageFolder):
        size, layout = size or transforms.size, layout or transforms.layout
        scale, transforms = transforms.scale, transforms.transforms
    else:
        scale = 1.0
    proto = deepcopy(raise_opset(read(model)))
    write_metadata(proto, IMAGES, [])  # the metadata were about the values of the replaced input
    target = _ReplacedInput.from_model(proto, input)
    front = _write_transforms(
        target, list(map(adapt_transform, transforms)), size, layout, dtype, scale
    )
    return _insert_before_model(proto, front, target, name)


@dataclass
class _ReplacedInput:
    """The model input that preprocessing replaces, and the graph in which the preprocessing nodes
    are written.

    Attributes:
        name: name of the input.
        dtype: dtype of the input.
        shape: shape of the input, if the model states its rank.
        op: emitter of the graph of the new nodes.
        taken: the names of values and dimensions of the model.
    """

    name: str
    dtype: ir.DataType
    shape: shapes.Dims | None
    op: Any
    taken: set[str]

    @classmethod
    def from_model(cls, proto: ModelProto, name: str | None) -> _ReplacedInput:
        """Return the `_ReplacedInput` for the input `name` of a model, or for its only input if
        `name` is None.

        Raises:
            ValueError: there is no such input, or it is no tensor of numbers.
        """
        inputs = {x.name: x for x in inputs_without_default(proto)}
        if name is None and len(inputs) != 1:
            raise ValueError(f"the model has the inputs {list(inputs)}: choose one by input=")
        name = next(iter(inputs)) if name is None else name
        if name not in inputs:
            raise unknown("input", name, inputs)
        value = ir.from_proto(inputs[name])
        numbers = value.dtype is not None and (
            value.dtype.is_floating_point() or value.dtype == ir.DataType.UINT8
        )
        if not isinstance(value.type, ir.TensorType) or not numbers:
            raise ValueError(
                f"the input {printable(name)!r} holds no floats or uint8: choose another input"
            )
        opset = next(o.version for o in proto.opset_import if not normalize_domain(o.domain))
        graph = ir.Graph([], [], nodes=[], opset_imports={"": opset}, name="preprocess")
        declared = [*proto.graph.input, *proto.graph.output, *proto.graph.value_info]
        taken = {d.dim_param for v in declared for d in v.type.tensor_type.shape.dim if d.dim_param}
        taken.update(value_names(proto.graph))
        return cls(name, value.dtype, shapes.dims(value), Emit(graph), taken)

    def add_raw_input(self, name: str, dtype: ir.DataType, *rest: int | str) -> ir.Value:
        """Add and return the new input for raw data, whose first axis is the batch axis of the
        replaced input.

        `rest` are lengths of the other axes, or names of symbols.
        """
        batch = (self.shape or ("N",))[0]
        others = [free_name(d, self.taken) if isinstance(d, str) else d for d in rest]
        value = ir.val(name, dtype, [batch, *others])
        self.op.graph.inputs.append(value)
        return value


def _write_transforms(
    target: _ReplacedInput,
    transforms: Sequence[Any],
    size: int | tuple[int, int] | None,
    layout: str | None,
    dtype: Any,
    scale: float,
) -> ir.Value:
    """Write the nodes of transforms, either all of images or all of waveforms, and return their
    result.
    """
    for transform in transforms:
        if not hasattr(transform, "write"):
            raise ValueError(
                f"the transform {transform!r} has no nodes: use transforms of onnxgrad, or an "
                "object with a method write(op, x)"
            )
    if dtype is None and not any(
        isinstance(transform, WaveformTransform) for transform in transforms
    ):
        return _write_image_transforms(target, transforms, size, layout, scale)
    for transform in transforms:
        if type(transform).__module__ == Normalize.__module__:
            raise ValueError(
                f"{transform!r} is for images, and other transforms or dtype= for waveforms: leave "
                "one of them out"
            )
    if size is not None or layout is not None:
        raise ValueError(
            "size and layout are for images, and the transforms for waveforms: leave out size and "
            "layout"
        )
    return _write_waveform_transforms(target, transforms, np.dtype(dtype or np.float32))


def _write_image_transforms(
    target: _ReplacedInput,
    transforms: Sequence[Any],
    size: int | tuple[int, int] | None,
    layout: str | None,
    scale: float,
) -> ir.Value:
    """Write the nodes of transforms of images, and return the result in the layout of the replaced
    input.
    """
    check_normalize_is_last(transforms)
    op = target.op
    if layout not in (None, "NCHW", "NHWC"):
        raise unknown("layout", layout, ["NCHW", "NHWC"])
    if target.shape is not None and len(target.shape) != 4:
        raise ValueError(
            f"the input {target.name!r} has {len(target.shape)} axes: images have 4, as in "
            "(N, channels, height, width)"
        )
    layout, channels = layout_and_channels(target.name, target.shape, layout, None, "preprocess")
    x = target.add_raw_input("image", ir.DataType.UINT8, "height", "width", channels)
    normalize = transforms[-1] if transforms and isinstance(transforms[-1], Normalize) else None
    for transform in transforms[:-1] if normalize else transforms:
        x = transform.write(op, x)
    if (final := _image_size(target, layout, size)) is not None:
        x = image_nodes.write_center_crop(
            op, image_nodes.write_resize_to_cover(op, x, final), final
        )
    if target.dtype == ir.DataType.UINT8:
        if normalize:
            raise ValueError(
                f"the input {target.name!r} is uint8, which holds no normalized values: leave "
                "out Normalize"
            )
    else:
        x = image_nodes.write_rescaling(op, x, scale)
    if normalize:
        if len(normalize.mean) not in (1, channels):
            raise ValueError(
                f"{normalize!r} does not fit an input of {channels} channels: give 1 or {channels} "
                "means"
            )
        x = normalize.write(op, x)
    return op.Transpose(x, perm=[0, 3, 1, 2]) if layout == "NCHW" else x


def _image_size(
    target: _ReplacedInput, layout: str, size: int | tuple[int, int] | None
) -> tuple[int, int] | None:
    """Return (height, width) of the model's input, or `size` if the input declares none."""
    asked = (size, size) if isinstance(size, int) else size
    start = 2 if layout == "NCHW" else 1
    stated = shapes.static((target.shape or (None,) * 4)[start : start + 2])
    if stated is None:
        return None if asked is None else (int(asked[0]), int(asked[1]))
    if asked is not None and tuple(asked) != stated:
        given = argument("size", size)
        raise ValueError(
            f"{given}: the input {target.name!r} takes images of {stated}: leave out size"
        )
    return stated[0], stated[1]


def _write_waveform_transforms(
    target: _ReplacedInput, transforms: Sequence[Any], dtype: np.dtype
) -> ir.Value:
    """Write the nodes of transforms of waveforms, and return the result with the axes of the
    replaced input.
    """
    op = target.op
    if dtype not in (np.float32, np.int16):
        raise unknown("dtype", str(dtype), ["float32", "int16"])
    x = target.add_raw_input("waveform", ir.DataType.from_numpy(dtype), "samples")
    if dtype == np.int16:
        x = op.Div(op.Cast(x, to=ir.DataType.FLOAT), 32768.0)
    for transform in transforms:
        x = transform.write(op, x)
    graph = op.graph
    graph.outputs[:] = [x]
    infer(ir.Model(graph, ir_version=8))
    want, have = target.shape, shapes.dims(x)
    if want is not None and have is not None and len(want) == len(have) + 1 and want[1] == 1:
        x = op.Unsqueeze(x, [1])
        have = (have[0], 1, *have[1:])
    if want is None or have is None:
        return x
    pairs, swapped = zip(have, want, strict=False), _are_last_axes_swapped(have, want)
    differ = any(h != w for h, w in pairs if isinstance(h, int) and isinstance(w, int))
    if len(have) != len(want) or differ or swapped:
        hint = ": try onnxgrad.data.mel_spectrogram(..., frames_first={})"
        other = isinstance(have[-1], int) and not isinstance(have[-2], int)
        raise ValueError(
            f"the transforms return {_format_shape(have)}, and the input {target.name!r} takes "
            f"{_format_shape(want)}"
            f"{hint.format(not other) if swapped else ': change the transforms'}"
        )
    return x


def _are_last_axes_swapped(have: shapes.Dims, want: shapes.Dims) -> bool:
    """Return whether the shapes `have` and `want` differ by a swap of their last two axes."""
    if len(have) != len(want) or len(have) < 3 or have[-2:] == want[-2:]:
        return False
    (a, b), (c, d) = have[-2:], want[-2:]
    return (isinstance(b, int) and b == c and not isinstance(d, int)) or (
        isinstance(a, int) and a == d and not isinstance(c, int)
    )


def _format_shape(shape: shapes.Dims) -> str:
    known = [str(d) if shapes.is_stated(d) else "?" for d in shape]
    return f"({', '.join(known)})"


def _insert_before_model(
    proto: ModelProto, x: ir.Value, target: _ReplacedInput, name: str | None
) -> ModelProto:
    """Put the nodes that compute `x` in front of the model `proto`, in place, and return
    `proto`.
    """
    graph, op = target.op.graph, target.op
    (raw,) = graph.inputs
    if name is not None and (not name or name in target.taken):
        raise ValueError(
            f"name={name!r} is empty, or the name of another value: choose another name"
        )
    result = op.copy_of(op.Cast(x, to=target.dtype)) if x is raw else op.Cast(x, to=target.dtype)
    graph.outputs[:] = [result]
    front = ir.Model(graph, ir_version=proto.ir_version)
    tidy(front)
    prefix = free_name("preprocess", {n.partition(".")[0] for n in target.taken})
    values = [*graph.initializers.values(), *(y for node in graph for y in node.outputs)]
    for value in values:
        value.name = target.name if value is result else f"{prefix}.{value.name}"
    for i, node in enumerate(graph):
        node.name = f"{prefix}.{node.op_type}_{i}"
    raw.name = name or free_name(str(raw.name), target.taken)
    written = to_proto(front)
    main = proto.graph
    old = next(i for i, v in enumerate(main.input) if v.name == target.name)
    main.value_info.append(main.input[old])
    main.input[old].CopyFrom(written.graph.input[0])
    for node in reversed(written.graph.node):
        main.node.insert(0, node)
    main.initializer.extend(written.graph.initializer)
    for tensor in written.graph.initializer:
        note = ir.val(tensor.name, ir.DataType(tensor.data_type), tensor.dims)
        note.metadata_props[_KIND] = _BUFFER
        main.value_info.append(ir.to_proto(note))
    proto.ir_version = max(proto.ir_version, written.ir_version)
    return proto
