"""Evidence that a constant is a weight: its elements, its name, and the metadata of exporters."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import onnx_ir as ir
from onnx import GraphProto

HUGE = 9e3  # larger than any learned bias; masks of float16 begin at -1e4

# metadata keys of PyTorch's exporter: the kind of a value, and the FX node of a node
_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
_NOTE = "pkg.torch.onnx.fx_node"


def _name_matcher(pattern: str, flags: int = 0) -> Callable[[str], bool]:
    """Return a function that says whether a name as a whole matches a regular expression."""
    compiled = re.compile(pattern, flags)
    return lambda name: compiled.fullmatch(name) is not None


# a name that PyTorch's TorchScript exporter gives to a Constant node
written_as_constant = _name_matcher(r"(.*/)?Constant(_\d+)?_output_0")
# a numbered name without a meaning, which exporters and optimizers generate for constants
is_generated = _name_matcher(
    r"""(.*/)?(Constant|ConstantOfShape|ConstantFolding|Const)(_\d+)*(_output_\d+)?(:\d+)?
    | (.*/)?(val|const|_?const_fold\w*|ortshared|scalar_tensor|_?tensor_constant|lifted_tensor
      |c_lifted_tensor|full|ones|zeros|ones_like|zeros_like|full_like|value|cst|shape_tensor)
      (_default)?([_.]?\d+)*(_token\w*)?(_ort.*)?
    | .*_output_\d+ | (sqrt|rsqrt|div|mul|add|sub|pow|neg|log|sum|mean|max|min|clamp|clone|detach
      |reciprocal|arange|select|slice|unsqueeze|squeeze|view|expand|index|item|to)(_\d+)*
    | .*cst\d* | [\d_.:]+ | _\w*""",
    re.VERBOSE,
)
# a name of the result of constant folding
_is_folded = _name_matcher(r"(.*/)?(exp|softplus|sigmoid|tanh)(_\d+)?(_output_\d+)?", re.IGNORECASE)
_is_learned = _name_matcher(
    r"""(.*[._/])?\w*(scale|temp|temperature|tau|alpha|beta|gamma|bias|weight|gain|lambda|slope|logit
    |kernel|coef|param\w*)s?[._\d]*""",
    re.VERBOSE | re.IGNORECASE,
)
# a running mean or variance
sounds_statistic = _name_matcher(r".*(running|moving)_?(mean|var).*", re.IGNORECASE)
# anchors, a mask, the units of a target, or the like
sounds_fixed = _name_matcher(
    r".*(anchor|grid|mean|std|var|point|prior|mask|stride|offset|unit|buffer|freq).*", re.IGNORECASE
)
sounds_affine = _name_matcher(  # a weight or bias of a layer
    r"(.*[._/])?(weight|bias|gamma|beta|kernel|lambda|layer_?scale)s?[._\d]*",
    re.IGNORECASE,
)
# a name that skl2onnx gives to a parameter of a naive Bayes classifier
of_naive_bayes = _name_matcher(
    r"(theta|sigma|sigma_sum_log|jointi|class_log_prior|feature_log_proba?)\d*"
)


# the zeros that transformers adds to the logits of BART, Marian and others, and does not train
of_final_logits = _name_matcher(r"(.*[._/])?final_logits_bias")


def sounds_learned(name: str) -> bool:
    """Return whether a scalar's name suggests a parameter ("tau"), or its exp or sigmoid."""
    return _is_folded(name) or (not is_generated(name) and _is_learned(name))


def parameters_by_metadata(graph: GraphProto) -> dict[str, bool]:
    """Return `{constant: whether it is a parameter}` for constants whose metadata state it."""
    return {
        value.name: entry.value == "PARAMETER"
        for value in (*graph.value_info, *graph.input)
        for entry in value.metadata_props
        if entry.key == _KIND
    }


def reads_parameters(node: ir.Node) -> bool | None:
    """Return whether `node` reads parameters, by the metadata of PyTorch's exporter.

    None if the metadata do not say what the node reads. Metadata of nodes survive onnxruntime's
    optimizer; metadata of values do not.
    """
    kinds = set(re.findall(r"%([pbc])_", node.metadata_props.get(_NOTE, "")))
    return None if len(kinds) != 1 else kinds == {"p"}


def is_additive_mask(array: np.ndarray) -> bool:
    """Return whether an array, added to attention scores, masks some of the scores.

    Such an array has infinite or huge numbers, or only zero and one other number.
    """
    if array.size and not np.abs(array).max() < HUGE:
        return True
    distinct = np.unique(array[np.isfinite(array)])
    return array.size > 2 and len(distinct) == 2 and 0 in distinct


def is_binary(array: np.ndarray) -> bool:
    """Return whether an array has zeros and ones, and no other numbers."""
    few = array.ravel()[:1000]  # large arrays are rarely masks, and are slow to sort
    return array.size > 1 and set(few.tolist()) <= {0, 1} and {*np.unique(array)} == {0, 1}


def is_constant_array(array: np.ndarray, number: float | None = None) -> bool:
    """Return whether all elements are equal, and equal to `number` if it is not None."""
    first = array.ravel()[0] if array.size else 0
    return bool((array == (first if number is None else number)).all())


def has_equal_steps(array: np.ndarray) -> bool:
    """Return whether an array has three or more elements in equal steps, such as 0, 1, 2, ..."""
    steps = np.diff(array.ravel().astype(np.float64))
    size = np.abs(steps).max(initial=0)
    return bool(len(steps) > 1 and size > 0 and (np.abs(steps - steps[0]) <= 1e-3 * size).all())


def has_linear_rows(array: np.ndarray) -> bool:
    """Return whether elements change linearly along the last axis, as the distances of ALiBi do."""
    if array.ndim < 2 or array.shape[-1] < 4 or is_constant_array(array):
        return False
    steps = np.diff(array.astype(np.float64), axis=-1)
    size = np.abs(steps).max(-1, keepdims=True)
    return bool((np.abs(np.abs(steps) - size) <= 1e-3 * size).all())


def are_alibi_slopes(array: np.ndarray) -> bool:
    """Return whether an array has the slopes of ALiBi, one number for each attention head.

    For n heads, n a power of two, the slopes are 2^(-8/n), 2^(-16/n), ...; for other n, the slopes
    for the power of two below n, and then every other slope for the power above n (Press, Smith &
    Lewis 2022).
    """
    heads = max(array.shape, default=1)
    if heads < 2 or array.size != heads:
        return False
    half = 1 << heads.bit_length() - 1  # the largest power of two that is not above
    slopes = 2.0 ** (-8 / half * np.arange(1, half + 1))
    others = 2.0 ** (-4 / half * np.arange(1, 2 * half + 1, 2))
    wanted = np.concatenate([slopes, others])[:heads]
    return np.allclose(np.abs(array.ravel().astype(np.float64)), wanted, rtol=1e-2, atol=0)


def is_wave_table(array: np.ndarray) -> bool:
    """Return whether a table has sines and cosines of positions.

    Either an axis runs over positions: then t[p+1] + t[p-1] = 2 cos(a) t[p], with one angle a for
    all p. Or an axis pairs sines with their cosines: then all sums of two squares are equal.
    """
    table = array.reshape([n for n in array.shape if n > 1])
    if table.ndim < 2 or not np.isfinite(array).all() or is_constant_array(array):
        return False
    axes = [_first_rows(np.moveaxis(table, i, -1)) for i in range(table.ndim)]
    return any((t.shape[1] >= 6 and _recurs_like_waves(t)) or _has_sine_pairs(t) for t in axes)


def _first_rows(table: np.ndarray) -> np.ndarray:
    """Return the first rows of a table as a matrix: at most 256, and fewer if rows are very
    long.
    """
    most = max(8, min(256, 2**18 // table.shape[-1]))
    return table[:most].reshape(-1, table.shape[-1])[:most]


def may_be_cosine_table(array: np.ndarray) -> bool:
    """Return whether a table may have the cosines or the sines of the positions 0, 1, ..."""
    table = array.reshape([n for n in array.shape if n > 1])
    if table.ndim < 2 or not np.abs(table).max() <= 1 or is_constant_array(table):
        return False
    firsts = [np.moveaxis(table, i, 0)[0] for i in range(table.ndim)]
    return any(is_constant_array(first, 0) or is_constant_array(first, 1) for first in firsts)


def _recurs_like_waves(table: np.ndarray) -> bool:
    """Return whether each row t of a table satisfies t[p+1] + t[p-1] = 2 cos(a) t[p] with one angle
    a.
    """
    table = table[:, :64].astype(np.float64).T
    sums, middle = table[2:] + table[:-2], table[1:-1]
    with np.errstate(invalid="ignore", divide="ignore"):
        factor = np.nan_to_num((sums * middle).sum(0) / (middle * middle).sum(0))
    varies = np.ptp(table, axis=0) > 1e-2 * np.abs(table).max()
    fits = np.abs(sums - factor * middle).max() <= 5e-3 * np.abs(table).max()
    turns = np.abs(factor) < 1.99  # it is 2 for linear functions
    return bool(fits and (varies & turns).mean() >= 0.05 and (np.abs(factor) <= 2.01).all())


def _has_sine_pairs(table: np.ndarray) -> bool:
    """Return whether columns form pairs with equal sums of squares, as sines and cosines do."""
    rows, width = table.astype(np.float64), table.shape[1]
    rows = rows[np.abs(rows).max(-1) > 0]  # without zero rows of class tokens or padding
    if len(rows) < 2 or width < 4 or width % 2 or is_constant_array(rows[1:] - rows[:1]):
        return False
    pairs = [rows.reshape(len(rows), -1, 2)]
    pairs += [
        rows.reshape(len(rows), parts, 2, -1).swapaxes(2, 3).reshape(len(rows), -1, 2)
        for parts in (1, 2, 3)
        if width % (2 * parts) == 0
    ]
    squares = [(p * p).sum(-1) for p in pairs]
    return any(np.ptp(s) <= 1e-2 * s.max() for s in squares)


def is_same_filter(array: np.ndarray) -> bool:
    """Return whether a weight filters all channels separately by one filter, as a blur does."""
    each = array.ndim > 2 and len(array) > 1 and array.shape[1] == 1
    return each and not is_constant_array(array) and is_constant_array(array - array[:1], 0)


def is_filter_bank(array: np.ndarray) -> bool:
    """Return whether a matrix is a filter bank: a window of frequencies in each row, or each
    column.

    A window is one run of positive numbers among zeros.
    """
    if array.ndim != 2 or min(array.shape) < 2 or array.size <= 64 or array.min() < 0:
        return False
    nonzero = array != 0
    if not 0 < nonzero.mean() < 0.4:
        return False
    edges = (np.diff(np.pad(t.astype(np.int8), ((0, 0), (1, 1)))) for t in (nonzero, nonzero.T))
    return any((np.count_nonzero(e, axis=1) <= 2).all() for e in edges)


def is_transform(array: np.ndarray) -> bool:
    """Return whether a factor of an input may be a fixed transform, of Fourier, mel or wavelets."""
    if array.size and (is_wave_table(array) or is_filter_bank(array)):
        return True
    length = max(array.shape[1:], default=0) if array.ndim > 2 else 0
    if length < 32 or array.size != len(array) * length:
        return False  # a filter for each output channel, with a single axis
    return _are_wavelets(array.reshape(-1, length)) or _is_low_pass(array.reshape(-1, length))


def _are_wavelets(filters: np.ndarray) -> bool:
    """Return whether each filter has its power near one frequency, and the frequencies differ."""
    if len(filters) < 8:
        return False
    power = np.abs(np.fft.rfft(filters.astype(np.float64), axis=1)) ** 2
    peaks = power.argmax(1)
    near = np.abs(np.arange(power.shape[1]) - peaks[:, None]) <= 2
    share = (power * near).sum(1) / np.maximum(power.sum(1), 1e-30)
    return bool((share > 0.9).mean() > 0.95 and len(set(peaks)) >= len(filters) // 3)


def _is_low_pass(filters: np.ndarray) -> bool:
    """Return whether `filters` is a single symmetric filter, as a windowed sinc is."""
    f = filters[0]
    return len(filters) == 1 and not is_constant_array(f) and np.allclose(f, f[::-1], rtol=1e-4)
