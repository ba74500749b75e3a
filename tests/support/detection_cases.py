"""Boxes, their losses in PyTorch, and a small detector."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

import onnxgrad as og
from tests.support.models import parse_model
from tests.support.running import session_of


def value_and_gradients(write, *arrays, wrt=1):
    """Return the value of a scalar that `write(op, *values)` writes, and its first gradients."""
    inputs = [
        ir.Value(name=f"x{i}", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(a.shape))
        for i, a in enumerate(arrays)
    ]
    graph = ir.Graph(inputs, [], nodes=[], opset_imports={"": 20}, name="loss")
    with og.graph.Emit(graph) as op:
        loss = op.ReduceMean(write(op, *inputs), keepdims=0)
        loss.name = "loss"
        graph.outputs.append(loss)
    proto = ir.to_proto(ir.Model(graph, ir_version=9))
    names = [f"x{i}" for i in range(wrt)]
    keep = og.DerivativeOptions.KeepOutputs
    gradient = og.onnx_derivative(proto, weights=[], inputs=names, options=keep)
    session = session_of(gradient)
    feed = {x.name: a for x, a in zip(inputs, arrays, strict=True)} | {
        "loss_grad": np.ones((), np.float32)
    }
    values = session.run(["loss", *(f"{n}_grad" for n in names)], feed)
    return values[0], values[1:]


def torch_value_and_gradients(function, *arrays, wrt=1):
    """Return the mean of a function in PyTorch in float64, and its first gradients."""
    import torch

    tensors = [torch.tensor(a, dtype=torch.float64) for a in arrays]
    for t in tensors[:wrt]:
        t.requires_grad_()
    loss = function(*tensors).mean()
    loss.backward()
    return loss.detach().numpy(), [t.grad.numpy() for t in tensors[:wrt]]


def assert_same_values(mine, other, rtol=1e-5):
    """Compare values, and gradients relative to their largest element."""
    assert np.isclose(mine[0], other[0], rtol=rtol, atol=0)
    for a, b in zip(mine[1], other[1], strict=True):
        assert np.abs(a - b).max() < rtol * np.abs(b).max()


def random_boxes(rng, *shape):
    """Return boxes (*shape, 4) in pixels, as left, top, right, bottom."""
    corner = rng.uniform(0, 30, (*shape, 2))
    return np.concatenate([corner, corner + rng.uniform(3, 30, (*shape, 2))], -1).astype(np.float32)


def torch_iou(a, b, kind, eps=1e-7):
    """torchvision.ops.generalized_box_iou_loss and complete_box_iou_loss, without one minus."""
    import torch

    (x1, y1, x2, y2), (x1g, y1g, x2g, y2g) = a.unbind(-1), b.unbind(-1)
    w = (torch.minimum(x2, x2g) - torch.maximum(x1, x1g)).clamp(0)
    h = (torch.minimum(y2, y2g) - torch.maximum(y1, y1g)).clamp(0)
    inter = w * h
    union = (x2 - x1) * (y2 - y1) + (x2g - x1g) * (y2g - y1g) - inter
    iou = inter / (union + eps)
    cw = torch.maximum(x2, x2g) - torch.minimum(x1, x1g)
    ch = torch.maximum(y2, y2g) - torch.minimum(y1, y1g)
    if kind == "giou":
        return iou - (cw * ch - union) / (cw * ch + eps)
    if kind == "iou":
        return iou
    far = ((x1 + x2 - x1g - x2g) / 2) ** 2 + ((y1 + y2 - y1g - y2g) / 2) ** 2
    angle = torch.atan((x2g - x1g) / (y2g - y1g)) - torch.atan((x2 - x1) / (y2 - y1))
    v = 4 / torch.pi**2 * angle**2
    with torch.no_grad():
        alpha = v / (1 - iou + v + eps)
    return iou - far / (cw**2 + ch**2 + eps) - alpha * v


def anchor_points(size, strides=(8, 16, 32)):
    """Return the centers of the cells of all levels, and their stride, (anchors, 3)."""
    import torch

    points = [
        (x * s + s / 2, y * s + s / 2, s)
        for s in strides
        for y in range(size[0] // s)
        for x in range(size[1] // s)
    ]
    return torch.tensor(points, dtype=torch.float64)


LEVEL = """b{i} = Conv(f{i}, reg{i})  o{i} = Conv(f{i}, obj{i})  c{i} = Conv(f{i}, cls{i}, bias{i})
    so{i} = Sigmoid(o{i})  sc{i} = Sigmoid(c{i})  p{i} = Concat <axis=1> (b{i}, so{i}, sc{i})
    r{i} = Reshape(p{i}, flat)"""


def random_weights(shapes):
    """Return float32 arrays of these shapes by name."""
    rng = np.random.default_rng(0)
    return {n: rng.normal(scale=0.1, size=s).astype(np.float32) for n, s in shapes.items()}


def small_yolox(classes=2):
    """A YOLOX of one layer, for pictures of 32 x 32 pixels: 16, 4 and 1 anchors."""
    columns = 5 + classes
    text = f"""
        yolox (float[N,3,32,32] images) => (float[N,21,{columns}] output)
        <int64[3] flat = {{0, {columns}, -1}}> {{
            h = Conv <kernel_shape=[8,8], strides=[8,8]> (images, stem)  f0 = Relu(h)
            f1 = AveragePool <kernel_shape=[2,2], strides=[2,2]> (f0)
            f2 = AveragePool <kernel_shape=[2,2], strides=[2,2]> (f1)
            {LEVEL.format(i=0)} {LEVEL.format(i=1)} {LEVEL.format(i=2)}
            all = Concat <axis=2> (r0, r1, r2)
            output = Transpose <perm=[0,2,1]> (all) }}"""
    shapes = {"stem": (16, 3, 8, 8)}
    for i in range(3):
        shapes |= {f"reg{i}": (4, 16, 1, 1), f"obj{i}": (1, 16, 1, 1), f"bias{i}": (classes,)}
        shapes[f"cls{i}"] = (classes, 16, 1, 1)
    return parse_model(text, opset=20, **random_weights(shapes))
