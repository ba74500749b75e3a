"""Random nodes of the operators through which axes are followed: operands, attributes, outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onnxgrad.operators import ELEMENTWISE

Rng = np.random.Generator


@dataclass
class NodeCase:
    """A node, and the operands by which its axes, shapes or sizes are named: constants."""

    op_type: str
    operands: list[np.ndarray | None]
    attributes: dict[str, Any] = field(default_factory=dict)
    constants: tuple[int, ...] = ()
    outputs: int = 1


DRAWS: dict[str, Callable[[Rng, str], NodeCase]] = {}
NOT_RUN = {"CumProd", "RMSNormalization", "Swish"}  # by opset 21; others are followed like these


def draws_for(*op_types: str) -> Callable:
    """Register a function `(rng, op_type) -> NodeCase` for these operators."""

    def add(function: Callable) -> Callable:
        DRAWS.update(dict.fromkeys(op_types, function))
        return function

    return add


def lengths(rng: Rng, low: int, high: int, least: int = 1) -> tuple[int, ...]:
    """Return random lengths, often equal ones, which do not tell one axis from another."""
    n = int(rng.integers(low, high + 1))
    return (int(rng.integers(2, 4)),) * n if rng.integers(2) else tuple(rng.integers(least, 5, n))


def draw_floats(rng: Rng, *shape: int) -> np.ndarray:
    return rng.uniform(-2, 2, shape).astype(np.float32)


def tensor(rng: Rng, low: int = 1, high: int = 4, least: int = 1) -> np.ndarray:
    return draw_floats(rng, *lengths(rng, low, high, least))


def an_axis(rng: Rng, n: int) -> int:
    return int(rng.integers(-n, n))


def some_axes(rng: Rng, n: int, least: int = 0) -> np.ndarray:
    chosen = rng.permutation(n)[: rng.integers(least, n + 1)]
    return np.array([a - n * rng.integers(2) for a in chosen], np.int64)


def maybe(rng: Rng, value: Any) -> Any:
    return value if rng.integers(2) else None


def draw_flags(rng: Rng, *names: str) -> dict[str, int]:
    """Return attributes 0 or 1, of which some are left out."""
    return {name: int(rng.integers(2)) for name in names if rng.integers(3)}


BOOLEANS = {"And", "Not", "Or", "Xor"}
INTEGERS = {"BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor", "Mod"}
SEVERAL = {"Max", "Mean", "Min", "Sum"}
BINARY = BOOLEANS | INTEGERS | set("Add Div Equal Greater GreaterOrEqual Less Mul Sub".split())
BINARY = (BINARY | {"LessOrEqual", "Pow"}) - {"Not", "BitwiseNot"}


@draws_for(*ELEMENTWISE, "Dropout", "Expand")
def draw_elementwise(rng, op_type):
    shape = lengths(rng, 0, 4)

    def operand(whole=False):
        front = 0 if whole else rng.integers(len(shape) + 1)
        own = [d if whole or rng.integers(3) else 1 for d in shape[front:]]
        values = draw_floats(rng, *own)
        if op_type in BOOLEANS:
            return values > 0
        return np.int64(9 + 4 * values) if op_type in INTEGERS else values

    count = 2 if op_type in BINARY else 1
    count = rng.integers(1, 4) if op_type in SEVERAL else count
    operands = [operand() for _ in range(count)]
    if op_type in ("Expand", "PRelu", "Clip", "CastLike"):
        first = operand(whole=op_type != "Expand")
        others = {
            "Expand": [np.array(shape, np.int64)],
            "PRelu": [operand()],
            "Clip": [draw_floats(rng), draw_floats(rng)],
            "CastLike": [operand()],
        }
        constants = (1,) if op_type == "Expand" else ()
        return NodeCase(op_type, [first, *others[op_type]], constants=constants)
    if op_type == "Where":
        operands = [operand() > 0, operand(), operand()]
    outputs = int(rng.integers(1, 3)) if op_type == "Dropout" else 1
    return NodeCase(op_type, operands, {"to": 11} if op_type == "Cast" else {}, outputs=outputs)


@draws_for(*(f"Reduce{name}" for name in "L1 L2 LogSum LogSumExp Max Mean Min Prod Sum".split()))
@draws_for("ReduceSumSquare")
def reduction(rng, op_type):
    x = np.abs(tensor(rng)) if op_type == "ReduceLogSum" else tensor(rng)
    axes = maybe(rng, some_axes(rng, x.ndim))
    return NodeCase(op_type, [x, axes], draw_flags(rng, "keepdims", "noop_with_empty_axes"), (1,))


@draws_for("ArgMax", "ArgMin", "Hardmax", "LogSoftmax", "LpNormalization", "Softmax")
def draw_along_axis(rng, op_type):
    x = tensor(rng)
    attributes = {"axis": an_axis(rng, x.ndim)} if rng.integers(3) else {}
    if op_type.startswith("Arg"):
        attributes |= draw_flags(rng, "keepdims", "select_last_index")
    return NodeCase(op_type, [x], attributes)


@draws_for("TopK", "Split")
def parts(rng, op_type):
    x = tensor(rng)
    axis = an_axis(rng, x.ndim)
    if op_type == "TopK":
        k = np.array([rng.integers(1, x.shape[axis] + 1)])
        return NodeCase(op_type, [x, k], {"axis": axis} | draw_flags(rng, "largest"), (1,), 2)
    first = int(rng.integers(1, x.shape[axis] + 1))
    sizes = np.array([first, x.shape[axis] - first])
    return NodeCase(op_type, [x, sizes], {"axis": axis}, (1,), 2)


@draws_for("CumSum")
def cumulative(rng, op_type):
    x = tensor(rng)
    axis = np.array(an_axis(rng, x.ndim))
    return NodeCase(op_type, [x, axis], draw_flags(rng, "exclusive", "reverse"), (1,))


@draws_for("Concat")
def concat(rng, op_type):
    shape = lengths(rng, 1, 4)
    axis, operands = an_axis(rng, len(shape)), []
    for _ in range(rng.integers(1, 4)):
        own = list(shape)
        own[axis] = int(rng.integers(1, 4))
        operands.append(draw_floats(rng, *own))
    return NodeCase(op_type, operands, {"axis": axis})


@draws_for("Gather", "GatherElements", "GatherND", "Compress")
def gather(rng, op_type):
    x = tensor(rng)
    axis = an_axis(rng, x.ndim)
    n = x.shape[axis]
    if op_type == "Gather":
        return NodeCase(op_type, [x, rng.integers(-n, n, lengths(rng, 0, 2))], {"axis": axis})
    if op_type == "Compress":
        mask = np.arange(n) == rng.integers(n)
        return NodeCase(op_type, [x, mask | (rng.random(n) > 0.5)], {"axis": axis}, (1,))
    if op_type == "GatherND":
        b = int(rng.integers(x.ndim))
        k = int(rng.integers(1, x.ndim - b + 1))
        shape = (*x.shape[:b], *lengths(rng, 0, 2))
        indices = rng.integers(0, min(x.shape[b : b + k]), (*shape, k))
        return NodeCase(op_type, [x, indices], {"batch_dims": b})
    shape = [int(rng.integers(1, d + 1)) if rng.integers(2) else d for d in x.shape]
    return NodeCase(op_type, [x, rng.integers(0, n, shape)], {"axis": axis})


@draws_for("Squeeze", "Unsqueeze", "Transpose", "Reshape", "Flatten", "Tile")
def moved(rng, op_type):
    x = tensor(rng)
    n = x.ndim
    if op_type == "Squeeze":
        ones = [a for a, d in enumerate(x.shape) if d == 1 and rng.integers(3)]
        axes = np.array([a - n * rng.integers(2) for a in ones], np.int64)
        return NodeCase(op_type, [x, axes if axes.size else None], constants=(1,))
    if op_type == "Unsqueeze":
        more = rng.integers(1, 3)
        axes = rng.permutation(n + more)[:more] - (n + more) * rng.integers(2)
        return NodeCase(op_type, [x, axes], constants=(1,))
    if op_type == "Transpose":
        return NodeCase(
            op_type, [x], {"perm": rng.permutation(n).tolist()} if rng.integers(4) else {}
        )
    if op_type == "Flatten":
        return NodeCase(op_type, [x], {"axis": int(rng.integers(-n, n + 1))})
    if op_type == "Tile":
        return NodeCase(op_type, [x, rng.integers(1, 3, n)], constants=(1,))
    target = list(x.shape)
    for _ in range(rng.integers(1, 4)):  # neighbors are joined, lengths split
        i = int(rng.integers(len(target)))
        if rng.integers(2):
            target[i : i + 2] = [int(np.prod(target[i : i + 2]))]
        elif target[i] % 2 == 0:
            target[i : i + 1] = [2, target[i] // 2] if rng.integers(2) else [target[i] // 2, 2]
    return NodeCase(op_type, [x, np.array(target, np.int64)], constants=(1,))


@draws_for("Slice", "Pad")
def slice_or_pad(rng, op_type):
    x = tensor(rng, least=2)
    axes = some_axes(rng, x.ndim, least=1)
    if rng.integers(3) == 0:
        axes = np.arange(rng.integers(1, x.ndim + 1) if op_type == "Slice" else x.ndim)
        named = None
    else:
        named = axes
    k = len(axes)
    if op_type == "Slice":
        forward = rng.integers(2, size=k) * 2 - 1
        starts = np.where(forward > 0, rng.integers(0, 2, k), -1)
        ends = np.where(forward > 0, rng.choice([-1, 9], k), -99)
        return NodeCase(op_type, [x, starts, ends, named, forward], constants=(1, 2, 3, 4))
    pads = rng.integers(0, 2, 2 * k) * rng.integers(0, 2)
    mode = str(rng.choice(["constant", "edge", "reflect"]))
    return NodeCase(op_type, [x, pads, draw_floats(rng), named], {"mode": mode}, (1, 3))


@draws_for("ReverseSequence")
def reverse_sequence(rng, op_type):
    x = tensor(rng, 2, 4)
    batch = int(rng.integers(2))
    sizes = rng.integers(1, x.shape[1 - batch] + 1, x.shape[batch])
    return NodeCase(op_type, [x, sizes], {"batch_axis": batch, "time_axis": 1 - batch})


@draws_for("OneHot", "Trilu", "Det")
def draw_others(rng, op_type):
    if op_type == "OneHot":
        indices = rng.integers(0, 3, lengths(rng, 1, 3))
        axis = an_axis(rng, indices.ndim + 1)
        return NodeCase(op_type, [indices, np.array(3), np.float32([0, 1])], {"axis": axis}, (1, 2))
    if op_type == "Trilu":
        return NodeCase(op_type, [tensor(rng, 2, 4)], draw_flags(rng, "upper"))
    n = int(rng.integers(1, 4))
    return NodeCase(op_type, [draw_floats(rng, *lengths(rng, 0, 2), n, n)])


@draws_for("MatMul", "Gemm")
def product(rng, op_type):
    m, k, n = rng.integers(1, 5, 3)
    if op_type == "MatMul":
        front = lengths(rng, 0, 2)
        fronts = [[d if rng.integers(3) else 1 for d in front[rng.integers(3) :]] for _ in "ab"]
        return NodeCase(
            op_type, [draw_floats(rng, *fronts[0], m, k), draw_floats(rng, *fronts[1], k, n)]
        )
    options = draw_flags(rng, "transA", "transB")
    a = draw_floats(rng, *((k, m) if options.get("transA") else (m, k)))
    b = draw_floats(rng, *((n, k) if options.get("transB") else (k, n)))
    c = maybe(rng, draw_floats(rng, *[(m, n), (n,), (m, 1), (1, n), ()][rng.integers(5)]))
    return NodeCase(op_type, [a, b, c], options)


@draws_for("Einsum")
def einsum(rng, op_type):
    size = dict(zip("abcd", rng.integers(1, 4, 4).tolist(), strict=True))
    terms = ["".join(rng.choice(list("abcd"), rng.integers(1, 4))) for _ in range(2)]
    used = sorted(set("".join(terms)))
    output = "".join(rng.permutation(used)[: rng.integers(0, len(used) + 1)])
    operands = [draw_floats(rng, *(size[c] for c in term)) for term in terms]
    equation = ",".join(terms) + (f"->{output}" if rng.integers(4) else "")
    return NodeCase(op_type, operands, {"equation": equation})


@draws_for("BatchNormalization", "GroupNormalization", "InstanceNormalization", "LRN")
@draws_for("LayerNormalization", "MeanVarianceNormalization")
def normalization(rng, op_type):
    x = tensor(rng, 4, 4) if op_type in ("LRN", "MeanVarianceNormalization") else tensor(rng, 3, 4)
    channels = x.shape[1]
    if op_type == "LRN":
        return NodeCase(op_type, [x], {"size": 3})
    if op_type == "MeanVarianceNormalization":
        return NodeCase(op_type, [x], {"axes": [0, 2, 3]} if rng.integers(2) else {})
    if op_type == "LayerNormalization":
        axis = an_axis(rng, x.ndim)
        scale = draw_floats(rng, *x.shape[axis % x.ndim :])
        return NodeCase(op_type, [x, scale, scale], {"axis": axis}, outputs=int(rng.integers(1, 4)))
    scale, bias, mean = (draw_floats(rng, channels) for _ in range(3))
    options = {"num_groups": channels} if op_type == "GroupNormalization" else {}
    statistics = [mean, np.abs(scale) + 1] if op_type == "BatchNormalization" else []
    return NodeCase(op_type, [x, scale, bias, *statistics], options)


@draws_for("AveragePool", "GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool", "LpPool", "MaxPool")
@draws_for("Conv", "ConvTranspose", "DepthToSpace", "SpaceToDepth", "GridSample", "RoiAlign")
def draw_image_operator(rng, op_type):
    n, c = rng.integers(1, 5, 2).tolist()
    x = draw_floats(rng, n, c, 4, 4)
    if op_type in ("Conv", "ConvTranspose"):
        both = (2, c) if op_type == "Conv" else (c, 2)
        return NodeCase(op_type, [x, draw_floats(rng, *both, 2, 2), draw_floats(rng, 2)])
    if op_type == "DepthToSpace":
        mode = str(rng.choice(["CRD", "DCR"]))
        return NodeCase(op_type, [draw_floats(rng, n, 4 * c, 2, 2)], {"blocksize": 2, "mode": mode})
    if op_type == "SpaceToDepth":
        return NodeCase(op_type, [x], {"blocksize": 2})
    if op_type == "GridSample":
        return NodeCase(op_type, [x, draw_floats(rng, n, 3, 4, 2) / 2])
    if op_type == "RoiAlign":
        boxes = np.float32([[0, 0, 2, 2], [1, 1, 3, 3], [0, 1, 3, 2]])
        options = {"output_height": 2, "output_width": 2}
        return NodeCase(op_type, [x, boxes, rng.integers(0, n, 3)], options)
    options = {} if op_type.startswith("Global") else {"kernel_shape": [2, 2]}
    return NodeCase(op_type, [x], options, outputs=1 + (op_type == "MaxPool"))


@draws_for("Resize")
def resize(rng, op_type):
    x = draw_floats(rng, *rng.integers(1, 5, 2), *rng.integers(2, 6, 2))
    axes = [[2, 3], [3], [-1, -2], None][rng.integers(4)]
    modes = "asymmetric half_pixel align_corners pytorch_half_pixel tf_crop_and_resize".split()
    options = {
        "mode": str(rng.choice(["linear", "nearest", "cubic"])),
        "coordinate_transformation_mode": str(rng.choice(modes)),
    }
    n = 4 if axes is None else len(axes)
    roi = np.float32([0.2] * n + [0.9] * n) if "tf" in str(options) else None
    own = np.array(x.shape)[axes or range(4)]
    choices = [1, 2, 1.2, 0.8]
    front = 2 if axes is None else 0
    scales = np.float32([1] * front + rng.choice(choices, n - front).tolist())
    options |= {} if axes is None else {"axes": axes}
    if rng.integers(2):
        return NodeCase(op_type, [x, roi, scales], options, (1, 2))
    sizes = np.maximum(1, np.int64(own * scales))
    if axes is not None and rng.integers(2):
        options["keep_aspect_ratio_policy"] = str(rng.choice(["not_larger", "not_smaller"]))
    return NodeCase(op_type, [x, roi, None, sizes], options, (1, 3))


@draws_for("GRU", "LSTM", "RNN")
def draw_recurrent(rng, op_type):
    time, rows, width, hidden = rng.integers(1, 4, 4).tolist()
    gates = {"GRU": 3, "LSTM": 4, "RNN": 1}[op_type]
    both = bool(rng.integers(2))
    x = draw_floats(rng, time, rows, width)
    w, r = (draw_floats(rng, 1 + both, gates * hidden, k) for k in (width, hidden))
    sizes = maybe(rng, rng.integers(1, time + 1, rows).astype(np.int32))
    states = [draw_floats(rng, 1 + both, rows, hidden) for _ in range(1 + (op_type == "LSTM"))]
    options = {"hidden_size": hidden, "direction": "bidirectional" if both else "forward"}
    outputs = 3 if op_type == "LSTM" else 2
    return NodeCase(op_type, [x, w, r, None, sizes, *states], options, outputs=outputs)


@draws_for("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss")
def draw_loss(rng, op_type):
    rows, classes, *rest = rng.integers(2, 5, rng.integers(2, 4)).tolist()
    labels = rng.integers(0, classes, (rows, *rest))
    weights = maybe(rng, np.abs(draw_floats(rng, classes)))
    options = {"reduction": str(rng.choice(["none", "none", "sum", "mean"]))}
    outputs = 2 if op_type.startswith("Softmax") else 1
    return NodeCase(
        op_type, [draw_floats(rng, rows, classes, *rest), labels, weights], options, (), outputs
    )
