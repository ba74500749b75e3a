"""Rows for convolutions and pooling: id, node, shapes of its inputs, and what is special."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import onnx
import pytest

from tests.support.models import parse_model
from tests.support.packs import Part, gradients_on
from tests.support.running import in_sweep


class Convolution(NamedTuple):
    """One node `Y = node` with inputs x, w, b of the given shapes."""

    id: str
    node: str
    shapes: tuple[tuple[int, ...], ...]


CONVOLUTIONS = [
    Convolution("conv 1-D", "Conv(x, w)", ((2, 3, 7), (4, 3, 3))),
    Convolution("conv bias", "Conv(x, w, b)", ((2, 3, 5, 6), (4, 3, 3, 2), (4,))),
    Convolution(
        "conv 3-D", "Conv<pads=[1,0,1,0,1,0]>(x, w, b)", ((1, 2, 4, 3, 5), (3, 2, 2, 2, 3), (3,))
    ),
    Convolution("conv 1x1", "Conv(x, w)", ((2, 3, 4, 4), (5, 3, 1, 1))),
    Convolution("conv 1x1 strided", "Conv<strides=[2,3]>(x, w)", ((2, 3, 6, 5), (5, 3, 1, 1))),
    Convolution("conv strides", "Conv<strides=[2,1]>(x, w)", ((2, 2, 7, 5), (3, 2, 3, 2))),
    Convolution("conv strides, rest", "Conv<strides=[3,2]>(x, w)", ((2, 2, 8, 6), (3, 2, 3, 3))),
    Convolution(
        "conv strides, rest in the padding",
        "Conv<strides=[2,2], pads=[1,1,1,1]>(x, w)",
        ((2, 2, 8, 8), (3, 2, 3, 3)),
    ),
    Convolution("conv uneven pads", "Conv<pads=[2,0,1,3]>(x, w)", ((1, 2, 4, 5), (3, 2, 3, 3))),
    Convolution(
        "conv same, smaller than the stride",
        'Conv<auto_pad="SAME_UPPER", strides=[3,2]>(x, w)',
        ((1, 2, 5, 7), (3, 2, 2, 1)),
    ),
    Convolution("conv dilations", "Conv<dilations=[2,3]>(x, w)", ((2, 2, 7, 8), (3, 2, 3, 2))),
    Convolution(
        "conv all of it",
        "Conv<strides=[2,3], dilations=[2,1], pads=[1,2,0,1], group=2>(x, w, b)",
        ((2, 4, 9, 8), (6, 2, 3, 2), (6,)),
    ),
    Convolution(
        "conv depthwise", "Conv<group=3, pads=[1,1,1,1]>(x, w)", ((2, 3, 5, 5), (6, 1, 3, 3))
    ),
    Convolution("conv wide", "Conv<pads=[40, 30]>(x, w, b)", ((2, 2, 20), (3, 2, 70), (3,))),
    Convolution(
        "conv wide, strided",
        "Conv<strides=[3], dilations=[2], pads=[70,60]>(x, w)",
        ((2, 2, 21), (3, 2, 65)),
    ),
    Convolution(
        "conv same upper", 'Conv<auto_pad="SAME_UPPER">(x, w)', ((1, 2, 5, 4), (3, 2, 2, 3))
    ),
    Convolution(
        "conv same lower", 'Conv<auto_pad="SAME_LOWER">(x, w)', ((1, 2, 5, 4), (3, 2, 2, 4))
    ),
    Convolution(
        "conv same upper strided",
        'Conv<auto_pad="SAME_UPPER", strides=[2,3]>(x, w)',
        ((1, 2, 5, 7), (3, 2, 2, 3)),
    ),
    Convolution(
        "conv same lower strided",
        'Conv<auto_pad="SAME_LOWER", strides=[2,3]>(x, w)',
        ((1, 2, 6, 8), (3, 2, 3, 4)),
    ),
    Convolution(
        "conv valid",
        'Conv<auto_pad="VALID", kernel_shape=[2,2]>(x, w)',
        ((1, 2, 4, 4), (3, 2, 2, 2)),
    ),
    Convolution("transposed 1-D", "ConvTranspose(x, w)", ((2, 3, 4), (3, 2, 3))),
    Convolution(
        "transposed",
        "ConvTranspose<strides=[2,3], pads=[1,0,1,2]>(x, w, b)",
        ((2, 3, 4, 3), (3, 2, 3, 4), (2,)),
    ),
    Convolution(
        "transposed 3-D", "ConvTranspose<strides=[1,2,1]>(x, w)", ((1, 2, 2, 3, 2), (2, 3, 2, 2, 1))
    ),
    Convolution(
        "transposed, groups",
        "ConvTranspose<group=2, dilations=[2,1]>(x, w, b)",
        ((2, 4, 3, 3), (4, 3, 2, 2), (6,)),
    ),
    Convolution(
        "transposed, output_padding",
        "ConvTranspose<strides=[3,2], output_padding=[2,1], pads=[1,1,0,1]>(x, w)",
        ((1, 2, 3, 3), (2, 3, 3, 2)),
    ),
    Convolution(
        "transposed, output_shape",
        "ConvTranspose<strides=[2,2], output_shape=[7,8]>(x, w)",
        ((1, 2, 4, 4), (2, 3, 3, 3)),
    ),
    Convolution(
        "transposed, same upper",
        'ConvTranspose<strides=[2,2], auto_pad="SAME_UPPER">(x, w)',
        ((1, 2, 3, 4), (2, 3, 3, 3)),
    ),
    Convolution(
        "transposed, same lower",
        'ConvTranspose<strides=[2,2], auto_pad="SAME_LOWER">(x, w)',
        ((1, 2, 3, 4), (2, 3, 3, 3)),
    ),
    Convolution("max", "MaxPool<kernel_shape=[2,2], strides=[2,2]>(x)", ((2, 3, 4, 6),)),
    Convolution("max 1-D", "MaxPool<kernel_shape=[3]>(x)", ((2, 3, 7),)),
    Convolution("max 3-D", "MaxPool<kernel_shape=[2,2,2], strides=[2,2,2]>(x)", ((1, 2, 4, 4, 2),)),
    Convolution(
        "max overlapping", "MaxPool<kernel_shape=[3,2], strides=[2,1]>(x)", ((2, 2, 7, 5),)
    ),
    Convolution("max rest", "MaxPool<kernel_shape=[2,2], strides=[2,2]>(x)", ((2, 2, 5, 5),)),
    Convolution(
        "max pads", "MaxPool<kernel_shape=[3,3], strides=[2,2], pads=[1,1,0,1]>(x)", ((2, 2, 5, 6),)
    ),
    Convolution(
        "max dilations", "MaxPool<kernel_shape=[2,2], dilations=[2,3]>(x)", ((1, 2, 6, 6),)
    ),
    Convolution(
        "max ceil", "MaxPool<kernel_shape=[2,2], strides=[2,2], ceil_mode=1>(x)", ((1, 2, 5, 5),)
    ),
    Convolution(
        "max same",
        'MaxPool<kernel_shape=[3,3], strides=[2,2], auto_pad="SAME_LOWER">(x)',
        ((1, 2, 5, 6),),
    ),
    Convolution(
        "max column major", "MaxPool<kernel_shape=[2,2], storage_order=1>(x)", ((1, 2, 4, 5),)
    ),
    Convolution("unpool", "MaxUnpool<kernel_shape=[2,2], strides=[2,2]>(MaxPool)", ((2, 2, 4, 4),)),
    Convolution("average", "AveragePool<kernel_shape=[2,2], strides=[2,2]>(x)", ((2, 3, 4, 6),)),
    Convolution("average 1-D", "AveragePool<kernel_shape=[3]>(x)", ((2, 3, 7),)),
    Convolution(
        "average 3-D", "AveragePool<kernel_shape=[2,1,2], strides=[2,1,1]>(x)", ((1, 2, 4, 3, 3),)
    ),
    Convolution(
        "average overlapping", "AveragePool<kernel_shape=[3,2], strides=[2,1]>(x)", ((2, 2, 8, 5),)
    ),
    Convolution(
        "average pads", "AveragePool<kernel_shape=[3,3], pads=[1,0,2,1]>(x)", ((1, 2, 5, 5),)
    ),
    Convolution(
        "average pads strided",
        "AveragePool<kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]>(x)",
        ((1, 2, 6, 5),),
    ),
    Convolution(
        "average pads counted",
        "AveragePool<kernel_shape=[3,3], pads=[1,0,2,1], count_include_pad=1>(x)",
        ((1, 2, 5, 5),),
    ),
    Convolution(
        "average ceil",
        "AveragePool<kernel_shape=[3,3], strides=[2,2], ceil_mode=1>(x)",
        ((1, 2, 6, 8),),
    ),
    Convolution(
        "average ceil, pads",
        "AveragePool<kernel_shape=[3,3], strides=[2,2], ceil_mode=1, pads=[1,0,1,0]>(x)",
        ((1, 2, 6, 8),),
    ),
    Convolution(
        "average ceil, pads counted",
        "AveragePool<kernel_shape=[3,3], strides=[2,2], ceil_mode=1, pads=[1,1,1,1], "
        "count_include_pad=1>(x)",
        ((1, 2, 6, 8),),
    ),
    Convolution(
        "average same",
        'AveragePool<kernel_shape=[3,2], strides=[2,2], auto_pad="SAME_UPPER">(x)',
        ((1, 2, 6, 5),),
    ),
    Convolution(
        "average dilations", "AveragePool<kernel_shape=[2,2], dilations=[2,3]>(x)", ((1, 2, 6, 6),)
    ),
    Convolution("global average", "GlobalAveragePool(x)", ((2, 3, 4, 5),)),
    Convolution("global average 1-D", "GlobalAveragePool(x)", ((2, 3, 4),)),
    Convolution("global max", "GlobalMaxPool(x)", ((2, 3, 4, 5),)),
]


def conv_model(case: Convolution, known: str) -> onnx.ModelProto:
    """Return the model of a row, of which so much is `known`.

    That are "all" lengths; all but the "rows" of x; also not those of its images ("channels"); of
    the weight only those of its "kernels"; or "nothing" but the ranks.
    """
    names = "xwb"[: len(case.shapes)]
    shapes = [list(map(str, shape)) for shape in case.shapes]
    if known == "kernels" and len(shapes) > 1:
        shapes[1][:2] = "OC"
    if known not in ("all", "kernels"):
        shapes[0][0] = "N"
    if known == "channels":
        shapes[0][2:] = [f"L{i}" for i in range(len(shapes[0]) - 2)]
    if known == "nothing":
        shapes = [[f"{n}{i}" for i in range(len(s))] for n, s in zip(names, shapes, strict=True)]
    inputs = ", ".join(f"float[{', '.join(s)}] {n}" for n, s in zip(names, shapes, strict=True))
    output = f"float[{', '.join(f'd{i}' for i in range(len(shapes[0])))}] y"
    body = f"y = {case.node}"
    if "MaxUnpool" in case.node:
        body = f"v, i = MaxPool<kernel_shape=[2,2], strides=[2,2]>(x)  y = {case.node}"
        body = body.replace("(MaxPool)", "(v, i)")
    return parse_model(f"g ({inputs}) => ({output}) {{ {body} }}", opset=20)


def convolution_feed(case: Convolution) -> dict[str, np.ndarray]:
    """Return normal numbers for the inputs of a row."""
    rng = np.random.default_rng(7)
    return {n: rng.standard_normal(s) for n, s in zip("xwb", case.shapes, strict=False)}


def convolution_parts(cases: list[Convolution], known: str) -> list[Part]:
    return [
        Part(case.id, conv_model(case, known), feed, tuple(feed))
        for case in cases
        for feed in [convolution_feed(case)]
    ]


CHECK = gradients_on("reference", "mixed", "float32")


def sweep_of(cases: list[Convolution]):
    """Return the cases singly, of the sweep, where the gradient is differentiated again."""
    return pytest.mark.parametrize("case", [in_sweep(case) for case in cases], ids=lambda c: c.id)
