"""Rows for convolutions and pooling: id, node, shapes of its inputs, and what is special."""

from __future__ import annotations

from typing import NamedTuple


class Case(NamedTuple):
    """One node `Y = node` with inputs x, w, b of the given shapes."""

    id: str
    node: str
    shapes: tuple[tuple[int, ...], ...]


CASES = [
    Case("conv 1-D", "Conv(x, w)", ((2, 3, 7), (4, 3, 3))),
    Case("conv bias", "Conv(x, w, b)", ((2, 3, 5, 6), (4, 3, 3, 2), (4,))),
    Case("conv 3-D", "Conv<pads=[1,0,1,0,1,0]>(x, w, b)", ((1, 2, 4, 3, 5), (3, 2, 2, 2, 3), (3,))),
    Case("conv 1x1", "Conv(x, w)", ((2, 3, 4, 4), (5, 3, 1, 1))),
    Case("conv 1x1 strided", "Conv<strides=[2,3]>(x, w)", ((2, 3, 6, 5), (5, 3, 1, 1))),
    Case("conv strides", "Conv<strides=[2,1]>(x, w)", ((2, 2, 7, 5), (3, 2, 3, 2))),
    Case("conv strides, rest", "Conv<strides=[3,2]>(x, w)", ((2, 2, 8, 6), (3, 2, 3, 3))),
    Case(
        "conv strides, rest in the padding",
        "Conv<strides=[2,2], pads=[1,1,1,1]>(x, w)",
        ((2, 2, 8, 8), (3, 2, 3, 3)),
    ),
    Case("conv uneven pads", "Conv<pads=[2,0,1,3]>(x, w)", ((1, 2, 4, 5), (3, 2, 3, 3))),
    Case("conv dilations", "Conv<dilations=[2,3]>(x, w)", ((2, 2, 7, 8), (3, 2, 3, 2))),
    Case(
        "conv all of it",
        "Conv<strides=[2,3], dilations=[2,1], pads=[1,2,0,1], group=2>(x, w, b)",
        ((2, 4, 9, 8), (6, 2, 3, 2), (6,)),
    ),
    Case("conv depthwise", "Conv<group=3, pads=[1,1,1,1]>(x, w)", ((2, 3, 5, 5), (6, 1, 3, 3))),
    Case("conv wide", "Conv<pads=[40, 30]>(x, w, b)", ((2, 2, 20), (3, 2, 70), (3,))),
    Case(
        "conv wide, strided",
        "Conv<strides=[3], dilations=[2], pads=[70,60]>(x, w)",
        ((2, 2, 21), (3, 2, 65)),
    ),
    Case("conv same upper", 'Conv<auto_pad="SAME_UPPER">(x, w)', ((1, 2, 5, 4), (3, 2, 2, 3))),
    Case("conv same lower", 'Conv<auto_pad="SAME_LOWER">(x, w)', ((1, 2, 5, 4), (3, 2, 2, 4))),
    Case(
        "conv same upper strided",
        'Conv<auto_pad="SAME_UPPER", strides=[2,3]>(x, w)',
        ((1, 2, 5, 7), (3, 2, 2, 3)),
    ),
    Case(
        "conv same lower strided",
        'Conv<auto_pad="SAME_LOWER", strides=[2,3]>(x, w)',
        ((1, 2, 6, 8), (3, 2, 3, 4)),
    ),
    Case(
        "conv valid",
        'Conv<auto_pad="VALID", kernel_shape=[2,2]>(x, w)',
        ((1, 2, 4, 4), (3, 2, 2, 2)),
    ),
    Case("transposed 1-D", "ConvTranspose(x, w)", ((2, 3, 4), (3, 2, 3))),
    Case(
        "transposed",
        "ConvTranspose<strides=[2,3], pads=[1,0,1,2]>(x, w, b)",
        ((2, 3, 4, 3), (3, 2, 3, 4), (2,)),
    ),
    Case(
        "transposed 3-D", "ConvTranspose<strides=[1,2,1]>(x, w)", ((1, 2, 2, 3, 2), (2, 3, 2, 2, 1))
    ),
    Case(
        "transposed, groups",
        "ConvTranspose<group=2, dilations=[2,1]>(x, w, b)",
        ((2, 4, 3, 3), (4, 3, 2, 2), (6,)),
    ),
    Case(
        "transposed, output_padding",
        "ConvTranspose<strides=[3,2], output_padding=[2,1], pads=[1,1,0,1]>(x, w)",
        ((1, 2, 3, 3), (2, 3, 3, 2)),
    ),
    Case(
        "transposed, output_shape",
        "ConvTranspose<strides=[2,2], output_shape=[7,8]>(x, w)",
        ((1, 2, 4, 4), (2, 3, 3, 3)),
    ),
    Case(
        "transposed, same upper",
        'ConvTranspose<strides=[2,2], auto_pad="SAME_UPPER">(x, w)',
        ((1, 2, 3, 4), (2, 3, 3, 3)),
    ),
    Case(
        "transposed, same lower",
        'ConvTranspose<strides=[2,2], auto_pad="SAME_LOWER">(x, w)',
        ((1, 2, 3, 4), (2, 3, 3, 3)),
    ),
    Case("max", "MaxPool<kernel_shape=[2,2], strides=[2,2]>(x)", ((2, 3, 4, 6),)),
    Case("max 1-D", "MaxPool<kernel_shape=[3]>(x)", ((2, 3, 7),)),
    Case("max 3-D", "MaxPool<kernel_shape=[2,2,2], strides=[2,2,2]>(x)", ((1, 2, 4, 4, 2),)),
    Case("max overlapping", "MaxPool<kernel_shape=[3,2], strides=[2,1]>(x)", ((2, 2, 7, 5),)),
    Case("max rest", "MaxPool<kernel_shape=[2,2], strides=[2,2]>(x)", ((2, 2, 5, 5),)),
    Case(
        "max pads", "MaxPool<kernel_shape=[3,3], strides=[2,2], pads=[1,1,0,1]>(x)", ((2, 2, 5, 6),)
    ),
    Case("max dilations", "MaxPool<kernel_shape=[2,2], dilations=[2,3]>(x)", ((1, 2, 6, 6),)),
    Case("max ceil", "MaxPool<kernel_shape=[2,2], strides=[2,2], ceil_mode=1>(x)", ((1, 2, 5, 5),)),
    Case(
        "max same",
        'MaxPool<kernel_shape=[3,3], strides=[2,2], auto_pad="SAME_LOWER">(x)',
        ((1, 2, 5, 6),),
    ),
    Case("max column major", "MaxPool<kernel_shape=[2,2], storage_order=1>(x)", ((1, 2, 4, 5),)),
    Case("unpool", "MaxUnpool<kernel_shape=[2,2], strides=[2,2]>(MaxPool)", ((2, 2, 4, 4),)),
    Case("average", "AveragePool<kernel_shape=[2,2], strides=[2,2]>(x)", ((2, 3, 4, 6),)),
    Case("average 1-D", "AveragePool<kernel_shape=[3]>(x)", ((2, 3, 7),)),
    Case(
        "average 3-D", "AveragePool<kernel_shape=[2,1,2], strides=[2,1,1]>(x)", ((1, 2, 4, 3, 3),)
    ),
    Case(
        "average overlapping", "AveragePool<kernel_shape=[3,2], strides=[2,1]>(x)", ((2, 2, 8, 5),)
    ),
    Case("average pads", "AveragePool<kernel_shape=[3,3], pads=[1,0,2,1]>(x)", ((1, 2, 5, 5),)),
    Case(
        "average pads strided",
        "AveragePool<kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]>(x)",
        ((1, 2, 6, 5),),
    ),
    Case(
        "average pads counted",
        "AveragePool<kernel_shape=[3,3], pads=[1,0,2,1], count_include_pad=1>(x)",
        ((1, 2, 5, 5),),
    ),
    Case(
        "average ceil",
        "AveragePool<kernel_shape=[3,3], strides=[2,2], ceil_mode=1>(x)",
        ((1, 2, 6, 8),),
    ),
    Case(
        "average ceil, pads",
        "AveragePool<kernel_shape=[3,3], strides=[2,2], ceil_mode=1, pads=[1,0,1,0]>(x)",
        ((1, 2, 6, 8),),
    ),
    Case(
        "average ceil, pads counted",
        "AveragePool<kernel_shape=[3,3], strides=[2,2], ceil_mode=1, pads=[1,1,1,1], "
        "count_include_pad=1>(x)",
        ((1, 2, 6, 8),),
    ),
    Case(
        "average same",
        'AveragePool<kernel_shape=[3,2], strides=[2,2], auto_pad="SAME_UPPER">(x)',
        ((1, 2, 6, 5),),
    ),
    Case(
        "average dilations", "AveragePool<kernel_shape=[2,2], dilations=[2,3]>(x)", ((1, 2, 6, 6),)
    ),
    Case("global average", "GlobalAveragePool(x)", ((2, 3, 4, 5),)),
    Case("global average 1-D", "GlobalAveragePool(x)", ((2, 3, 4),)),
    Case("global max", "GlobalMaxPool(x)", ((2, 3, 4, 5),)),
]
