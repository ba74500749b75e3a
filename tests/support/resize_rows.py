"""Rows of Resize and of operators that sample at places between elements."""

from __future__ import annotations

import numpy as np

from tests.support.cases import add, ints

# Resize has float32 kernels only, so these are checked on onnx.reference, or in float32

PICTURE = {"x": (1, 2, 3, 4)}
PLACES = "half_pixel half_pixel_symmetric pytorch_half_pixel align_corners asymmetric".split()


def resizes(name, attributes, shapes=None, scales=None, sizes=None):
    """Add a Resize with constant scales or sizes, and one with sizes known at run time.

    onnxruntime refuses sizes of which it does not know how many there are.
    """
    how = "s" if sizes is None else ", s"
    values = f"_floats={list(map(float, scales))}" if sizes is None else f"_ints={sizes}"
    body, shapes = f"y = Resize<{attributes}>(x, , {how})", shapes or PICTURE
    add(f"Resize {name}", f"s = Constant<value{values}>()  {body}", shapes, needs="rank")
    if sizes is not None:
        body = f"{counted(len(sizes))}  {body}"
        add(f"Resize {name}, run time", body, shapes, needs="rank", given={"t": ints(*sizes)})


def counted(n):
    return f"n = Constant<value_ints=[{n}]>()  s = Reshape(t, n)"


for mode in ("linear", "cubic", "nearest"):
    halves = f"{counted(4)}  f = Cast<to=1>(s)  h = Constant<value_float=0.5>()  v = Mul(f, h)"
    for axes in ((2, 2, 3, 4), (2, 2, 1, 3)):
        body, given = f'{halves}  y = Resize<mode="{mode}">(x, , v)', {"t": ints(*axes)}
        add(f"Resize {mode} scales at run time {axes}", body, PICTURE, needs="rank", given=given)
for mode in ("linear", "cubic", "nearest"):
    for place in PLACES:
        attributes = f'mode="{mode}", coordinate_transformation_mode="{place}"'
        resizes(f"{mode} {place} up", attributes, scales=(1, 1, 2, 1.6))
        resizes(f"{mode} {place} down", attributes, sizes=[1, 2, 2, 3])
for rounding in "round_prefer_floor round_prefer_ceil floor ceil".split():
    for place in PLACES[::2]:
        attributes = f'nearest_mode="{rounding}", coordinate_transformation_mode="{place}"'
        resizes(f"{rounding} {place} twice", attributes, scales=(1, 1, 2, 3))
        resizes(f"{rounding} {place}", attributes, {"x": (5,)}, scales=(1.5,))
CUBIC = 'mode="cubic"'
resizes("cubic coefficient", f"{CUBIC}, cubic_coeff_a=-0.5", scales=(1, 1, 1.5, 1.5))
resizes("cubic inside", f"{CUBIC}, exclude_outside=1", scales=(1, 1, 1.5, 0.7))
resizes("cubic plane", CUBIC, {"x": (3, 4)}, scales=(1.5, 0.7))
for mode in ("linear", "cubic"):
    for inside in (0, 1):
        attributes = f'mode="{mode}", antialias=1, exclude_outside={inside}'
        resizes(f"antialiased {mode} {inside} up", attributes, scales=(1, 1, 2, 1.5))
        resizes(f"antialiased {mode} {inside} down", attributes, scales=(1, 1, 0.7, 0.5))
        resizes(f"antialiased {mode} {inside} sizes", attributes, sizes=[1, 2, 2, 3])
for mode in ("linear", "cubic", "nearest"):
    body = (
        f'y = Resize<mode="{mode}", coordinate_transformation_mode="tf_half_pixel_for_nn">(x, , s)'
    )
    scales = "s = Constant<value_floats=[1.0, 1.0, 2.0, 1.6]>()"
    add(
        f"Resize {mode} half pixel of TensorFlow",
        f"{scales}  {body}",
        PICTURE,
        needs="rank",
        opset=18,
    )
LINEAR = 'mode="linear"'
resizes("linear volume", LINEAR, {"x": (1, 2, 2, 3, 2)}, sizes=[1, 2, 3, 2, 3])
resizes("linear rank 3", LINEAR, {"x": (2, 3, 2)}, scales=(1.5, 1, 2))
resizes("linear channels last", LINEAR, {"x": (1, 3, 4, 2)}, scales=(1, 2, 0.6, 1))
resizes("nothing", LINEAR, scales=(1, 1, 1, 1))
resizes("to the same sizes", LINEAR, sizes=[1, 2, 3, 4])
resizes("one axis stays as long", LINEAR, scales=(1, 1, 2, 1.2))
resizes("all axes stay as long", LINEAR, scales=(1, 1, 1.3, 1.2))
resizes("to one", LINEAR, sizes=[1, 2, 1, 1])
resizes("from one", 'mode="cubic"', {"x": (2, 1, 1, 1)}, sizes=[2, 1, 3, 2])
resizes("axes", f"{LINEAR}, axes=[3, 2]", scales=(2, 1.5))
resizes("negative axes", "axes=[-1, 0]", {"x": (2, 2, 3)}, scales=(1.6, 2))
for policy in ("not_larger", "not_smaller"):
    attributes = f'keep_aspect_ratio_policy="{policy}"'
    for axes in ([2, 3], [3, 2]):
        what = f"{policy} {axes}"
        resizes(what, f"{attributes}, axes={axes}", sizes=[5, 7])
        resizes(f"linear {what}", f"{LINEAR}, {attributes}, axes={axes}", sizes=[5, 7])
    resizes(f"{policy} cubic", f"{CUBIC}, {attributes}, axes=[3]", sizes=[7])
    resizes(f"{policy} all", attributes, {"x": (2, 3)}, sizes=[3, 7])
POLICY = 'mode="linear", keep_aspect_ratio_policy="not_larger"'
resizes("not_larger by little", POLICY, {"x": (3, 20)}, sizes=[3, 19])  # the first stays 3 long
TWICE = 'nearest_mode="floor", coordinate_transformation_mode="asymmetric"'
resizes("twice", TWICE, scales=(1, 1, 2, 2))
resizes("twice by sizes", TWICE, sizes=[1, 2, 6, 8])
for mode in ("linear", "cubic", "nearest"):
    crop = f'mode="{mode}", coordinate_transformation_mode="tf_crop_and_resize"'
    for name, roi in {"inside": (0.1, 0.2, 0.8, 0.9), "beyond": (-0.3, 0.2, 0.8, 1.2)}.items():
        low, high = roi[:2], roi[2:]
        part = f"r = Constant<value_floats={[0.0, 0.0, *low, 1.0, 1.0, *high]}>()"
        given = {"t": ints(1, 2, 4, 3)}
        attributes = f"{crop}, extrapolation_value=2.0"
        body = f"{part}  {counted(4)}  y = Resize<{attributes}>(x, r, , s)"
        add(f"Resize crop {mode} {name}", body, PICTURE, needs="rank", given=given)
        part = f"r = Constant<value_floats={[*low, *high]}>()"
        body = f"{part}  {counted(2)}  y = Resize<{attributes}, axes=[2, 3]>(x, r, , s)"
        given = {"t": ints(4, 3)}
        add(f"Resize crop {mode} {name} axes", body, PICTURE, needs="rank", given=given)


def grid(x):
    """Places within an image and a little beyond."""
    return np.tanh(x) * 1.3


def gridded(name, attributes, image, places, opset=20):
    """Add a GridSample, of whose two inputs only the second is moved into a domain."""
    moved = "h = Tanh(u)  c = Constant<value_float=1.3>()  v = Mul(h, c)"
    body = f"{moved}  y = GridSample<{attributes}>(x, v)"
    add(f"GridSample {name}", body, {"x": image, "u": places}, needs="rank", opset=opset)


for padding in ("zeros", "border", "reflection"):
    for aligned in (0, 1):
        options = f'padding_mode="{padding}", align_corners={aligned}'
        for mode in ("linear", "nearest", "cubic"):
            attributes = f'mode="{mode}", {options}'
            gridded(f"{mode} {padding} {aligned}", attributes, (2, 2, 3, 4), (2, 3, 2, 2))
            if mode != "cubic":
                shapes = (1, 2, 2, 3, 4), (1, 2, 1, 3, 3)
                gridded(f"{mode} {padding} {aligned} volume", attributes, *shapes)
gridded("bilinear", 'mode="bilinear"', (1, 1, 3, 4), (1, 2, 2, 2), opset=18)
gridded("bicubic", 'mode="bicubic"', (1, 1, 3, 4), (1, 2, 2, 2), opset=18)
for padding in ("zeros", "border", "reflection"):
    options = f'padding_mode="{padding}", align_corners=1'
    gridded(f"one element {padding}", options, (1, 2, 1, 4), (1, 2, 2, 2))
for aligned in (0, 1):
    attributes = f"align_corners={aligned}"
    for size in ([2, 3, 4, 2], [2, 1, 2, 3, 2]):
        n, body = len(size) - 2, f"y = AffineGrid<{attributes}>(t, s)"
        shapes, name = {"t": (2, n, n + 1)}, f"AffineGrid {n}-D {aligned}"
        add(name, f"s = Constant<value_ints={size}>()  {body}", shapes)
        add(f"{name}, run time", body, shapes, given={"s": ints(*size)})

COLUMNS = {
    "": ("", [5, 5], [2, 3], (2, 6, 12)),
    "strides": ("strides=[2, 3]", [5, 6], [2, 3], (1, 6, 4)),
    "dilations": ("dilations=[1, 2]", [4, 6], [2, 2], (1, 8, 12)),
    "pads": ("pads=[1, 0, 2, 1]", [4, 4], [3, 3], (2, 9, 15)),
    "1-D": ("strides=[2]", [7], [3], (2, 3, 3)),
    "3-D": ("pads=[0, 1, 0, 0, 1, 0]", [2, 3, 2], [1, 3, 2], (1, 6, 6)),
}
for what, (attributes, image, block, shape) in COLUMNS.items():
    node = f"y = Col2Im<{attributes}>(x, i, b)" if attributes else "y = Col2Im(x, i, b)"
    values = f"i = Constant<value_ints={image}>()  b = Constant<value_ints={block}>()"
    given = {"i": ints(*image), "b": ints(*block)}
    add(f"Col2Im {what}", f"{values}  {node}", {"x": shape})
    if attributes:
        add(f"Col2Im {what}, run time", node, {"x": shape}, given=given)

BENT = {
    "": ("", (1, 2, 4, 3), (3, 2, 2, 2), (1, 8, 3, 2), "x, w, u"),
    "bias": ("", (1, 2, 4, 3), (3, 2, 2, 2), (1, 8, 3, 2), "x, w, u, b"),
    "mask": ("", (2, 2, 4, 3), (3, 2, 2, 2), (2, 8, 3, 2), "x, w, u, b, m"),
    "mask alone": ("", (2, 2, 4, 3), (3, 2, 2, 2), (2, 8, 3, 2), "x, w, u, , m"),
    "groups": ("group=2", (2, 4, 4, 3), (4, 2, 2, 2), (2, 8, 3, 2), "x, w, u, b, m"),
    "offset groups": ("offset_group=2", (2, 4, 4, 3), (3, 4, 2, 2), (2, 16, 3, 2), "x, w, u, b, m"),
    "both groups": (
        "group=2, offset_group=4",
        (2, 4, 4, 3),
        (2, 2, 2, 2),
        (2, 32, 3, 2),
        "x, w, u, b, m",
    ),
    "geometry": (
        "strides=[2, 1], dilations=[1, 2], pads=[1, 0, 1, 2], kernel_shape=[2, 3]",
        (1, 2, 4, 5),
        (2, 2, 2, 3),
        (1, 12, 3, 3),
        "x, w, u, b, m",
    ),
}
for what, (attributes, image, weight, moves, operands) in BENT.items():
    shapes = {"x": image, "w": weight, "u": moves}
    if "b" in operands:
        shapes["b"] = weight[:1]
    if "m" in operands:
        shapes["m"] = (moves[0], moves[1] // 2, *moves[2:])
    node = f"y = DeformConv<{attributes or 'group=1'}>({operands})"
    add(f"DeformConv {what}", node, shapes, needs="" if "kernel" in attributes else "rank")

ROI = "c = Constant<value_floats=[0.3, 0.1, 2.6, 3.2]>()  h = Tanh(u)  v = Add(h, c)"
for mode in ("avg", "max"):
    for place in ("half_pixel", "output_half_pixel"):
        for ratio in (0, 2):
            attributes = f'mode="{mode}", coordinate_transformation_mode="{place}"'
            attributes += f", sampling_ratio={ratio}, output_height=2, output_width=3"
            add(
                f"RoiAlign {mode} {place} {ratio}",
                f"{ROI}  y = RoiAlign<{attributes}, spatial_scale=1.3>(x, v, b)",
                {"x": (2, 2, 4, 5), "u": (3, 4)},
                given={"b": ints(1, 0, 1)},
            )
    add(
        f"RoiAlign {mode} defaults",
        f'{ROI}  y = RoiAlign<mode="{mode}">(x, v, b)',
        {"x": (1, 1, 4, 4), "u": (2, 4)},
        given={"b": ints(0, 0)},
    )
REGIONS = ints(0, 0, 1, 3, 2, 1, 2, 0, 3, 3, 0, 1, 1, 9, 0, 1, 7, 7, 9, 9).reshape(4, 5)
for scale in (1.0, 0.7):
    for shape in ([1, 1], [2, 3]):
        node = f"y = MaxRoiPool<pooled_shape={shape}, spatial_scale={scale}>(x, r)"
        body, given = f"r = Cast<to=1>(i)  {node}", {"i": REGIONS}
        add(f"MaxRoiPool {shape} {scale}", body, {"x": (2, 2, 4, 5)}, given=given)
