"""Which constants of a model train, by default or by names and patterns of users, and why."""

from __future__ import annotations

import difflib
import math
import re
import warnings
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

import onnx_ir as ir
from onnx import ModelProto, TensorProto

from onnxgrad.errors import argument, join_first, named, printable, unknown
from onnxgrad.graph.tidy import take_apart
from onnxgrad.model.notes import ADAPTERS, HEAD, INPUTS, fine_tuned_tensors, read_metadata
from onnxgrad.model.read import ModelLike, read
from onnxgrad.model.traversal import model_nodes
from onnxgrad.model.weights import FLOATS, constant_refs
from onnxgrad.operators import operator_of
from onnxgrad.reporting import frames_inside, logger
from onnxgrad.training.modes.stored_integers import StoredWeight, store_floats, stored_weights
from onnxgrad.training.parameters.aliases import integer_aliases, read_aliases
from onnxgrad.training.parameters.equal_constants import (
    copies_of_tables,
    separate_merged,
    shares_tensors,
    warn_of_merged_parameters,
)
from onnxgrad.training.parameters.roles import QUANTIZED, judge_constants
from onnxgrad.training.parameters.table import (
    LISTED,
    Tensor,
    Tensors,
    names_and_reasons,
    quoted_name,
)

_TYPES = frozenset(
    TensorProto.DataType.Value(name)
    for name in "INT4 UINT4 INT8 UINT8 FLOAT8E4M3FN FLOAT8E5M2".split()
)
LAST = "last"  # instead of a pattern: the weights of the last layer
WHY = "a quantized weight: it stays; adapters train beside it"


def quantized_rows(proto: ModelProto) -> list[Tensor]:
    """Return a row of the table of `trainable` for each quantized weight of a model.

    A quantized weight is the first operand of a node that is a matrix of integers.
    """
    tensors = [(ref, ref.read()) for ref in constant_refs(proto)]
    found = {r.graph_name for r, t in tensors if t.data_type in _TYPES and len(t.dims) > 1}
    nodes = (node for node in model_nodes(proto) if found.intersection(node.input))
    weights = {next(name for name in node.input if name in found) for node in nodes}
    rows = []
    for ref, tensor in tensors:
        if ref.graph_name in weights:
            dtype, size = ir.DataType(tensor.data_type).name.lower(), math.prod(tensor.dims)
            rows.append(Tensor(ref.name, tuple(tensor.dims), dtype, size, False, WHY))
    aliases = integer_aliases(proto, rows)
    return [replace(row, alias=aliases.get(row.name, "")) for row in rows]


__all__ = ["Tensor", "Tensors", "default_weights", "names_and_reasons", "trainable"]


def trainable(
    model: ModelLike,
    train: str | Iterable[str] | None = None,
    freeze: str | Iterable[str] = (),
    *,
    pattern: str | None = None,
) -> Tensors:
    """Return the float constants of `model`, which of them train, and why; and quantized weights.

    Without `train`, a tensor trains if its role in the graph is a weight's: factor of a product
    with data, bias added to a product, scale or bias of a normalization, table of an embedding, and
    so on. Masks, running statistics, tables of sines, scales of attention or of images and
    other constants of formulas do not. In a model with adapters, the adapters train, and a new head
    beside them. `Trainer` takes the same `train` and `freeze`.

    Args:
        model: model, serialized model or path; not modified.
        train: names and patterns of `fnmatch`, as "layer4.*", of tensors that train. A pattern
            chooses among weights; a constant of another role trains if its name is listed. "last",
            unless a tensor has this name: the weights of the last layer, or of all last layers
            where the outputs are computed from several. None: the weights that
            train by default.
        freeze: names and patterns of tensors that do not train, also if `train` names them.
        pattern: returns only the tensors whose name or alias matches it.

    Returns:
        A list of tensors in the order of the graph, quantized weights last, with attributes `name`,
        `alias`, `shape`, `dtype`, `size`, `trains` and `why`. It prints as a table; so do its
        attributes `trained` and `frozen`, and slices. Where an exporter numbered a weight, as
        `onnx::MatMul_137`, the alias is its name in its module, as `encoder.query.weight`; `train`,
        `freeze` and `pattern` match it, too. The alias of a quantized weight is the name or alias
        that the weight had in floats.

    Raises:
        ModelError: `model` cannot be read, or computes with maps.
        ValueError: a name or pattern that matches nothing; the message lists close names.

    Examples:
        >>> import onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]> f (float[N,2] x) => (float[N,1] y)
        ...     <float[2] units = {0.1, 0.2}, float[2,1] w = {1.0, 2.0}>
        ...     { scaled = Mul(x, units) y = MatMul(scaled, w) }''')
        >>> print(og.trainable(model))
        name   shape   dtype    trains  why
        units  [2]     float32  no      a factor of an input before any weight (Mul)
        w      [2, 1]  float32  yes     factor of MatMul
        1 of 2 float constants train: 2 of 4 numbers
        >>> [t.name for t in og.trainable(model, train=["w", "units"], freeze="w").trained]
        ['units']
    """
    proto, train, freeze = named_integers_as_floats(read(model), train, freeze)
    separated = separate_merged(proto)
    rows = apply_choice(default_rows(separated), train, freeze)
    rows.extend(quantized_rows(separated))
    if pattern is None:
        return rows
    kept = {
        t.name for t in matching_tensors(rows, pattern, "weight (pattern=)", weights_first=False)
    }
    return Tensors(t for t in rows if t.name in kept)


def default_rows(proto: ModelProto) -> Tensors:
    """Return the float constants of a model, with the decision whether each trains by default."""
    graph, judged = judge_constants(proto)
    aliases, tied = read_aliases(graph, judged), copies_of_tables(proto, graph, judged)
    adapted, head = fine_tuned_tensors(proto), read_metadata(proto, HEAD)
    rows = Tensors()
    for row in judged:
        alias, copy_of, why = aliases.get(row.name, ""), tied.get(row.name, ""), row.why
        row = replace(row, alias=alias, copy_of=copy_of, is_weight=row.trains)
        if copy_of:
            why = f"{why}; a copy of {copy_of!r}"
        if row.name in adapted:
            why = "the new head beside adapters" if row.name in head else "an adapter"
            row = replace(row, trains=True, doubtful=False, is_weight=True)
        elif adapted:
            why = f"frozen: the model has adapters ({why})"
            row = replace(row, trains=False, doubtful=False)
        rows.append(replace(row, why=printable(why)))
    take_apart(graph)
    return rows


def default_weights(proto: ModelProto, announce: bool = False, needed: bool = True) -> list[str]:
    """Return the names of the weights that train by default.

    With `announce`, each float constant that does not train is logged with the reason, and a
    warning names uncertain decisions: on single numbers that may be learned, large tensors, copies,
    and parameters that share a tensor.

    Raises:
        ValueError: weights are `needed`, and none of the float constants trains.
    """
    if announce:
        warn_of_merged_parameters(proto)
    rows = default_rows(proto)
    names = [t.name for t in rows if t.trains]
    if not names and any(t.why.startswith(QUANTIZED) for t in rows):
        return [t.name for t in rows]  # the sweep raises an error that names the remedy
    if not names and needed:
        why = _advice_on_missing_gradient(proto)
        if not rows:
            why = why or "pass a model with weights in floats"
            raise ValueError(f"the model has no float constants to train: {why}")
        raise ValueError(
            f"none of the float constants is a weight by its role: {names_and_reasons(rows)}. "
            f"{why}{why and '. '}Name the constants to train with {argument('train')}"
        )
    if announce:
        announce_choice(rows)
    return names


def announce_choice(rows: Tensors) -> None:
    """Log the constants that do not train; warn of uncertain decisions and copies of weights."""
    if untrained := rows.frozen:
        logger.info("not trained: %s", names_and_reasons(untrained, len(untrained)))
    trained, messages = {t.name for t in rows.trained}, []
    if doubtful := [t for t in rows if t.doubtful]:
        decisions = [
            f"{quoted_name(t)} {'trains' if t.trains else 'does not train'}: {t.why}"
            for t in doubtful
        ]
        remedy = f"{named('List the weights')} to choose otherwise"
        messages.append(f"{join_first(decisions, LISTED, '; ')}. {remedy}")
    if copied := [t for t in rows if t.copy_of and {t.name, t.copy_of} & trained]:
        pairs = [f"{quoted_name(t)} and {printable(t.copy_of)!r}" for t in copied]
        messages.append(
            f"{join_first(pairs, LISTED, '; ')}: the exporter stored a shared weight twice, and "
            "these copies become different in training: onnxgrad.graph.tie_copies(model) makes "
            "them one tensor"
        )
    for message in messages:
        warnings.warn(message, stacklevel=frames_inside() + 1)


def _advice_on_missing_gradient(proto: ModelProto) -> str:
    """Return how the first operator without a gradient can be fitted; "" if all have gradients."""
    for node in model_nodes(proto):
        if how := operator_of(node).fitted:
            name = f" {printable(node.name)!r}" if node.name else ""
            return f"{node.op_type}{name} {how}"
    return ""


# -- weights that a user names by patterns ---------------------------------------------------------


def choose_weights(proto: ModelProto, train: Patterns | None, freeze: Patterns = ()) -> list[str]:
    """Return the names of the weights to train, in the order of the graph.

    Args:
        proto: the model.
        train: names and patterns of `fnmatch`, see `trainable`; None: the weights that train by
            default.
        freeze: names and patterns of weights that do not train.

    Raises:
        ValueError: a pattern that matches no float constant, or nothing is left to train.
    """
    train, freeze = None if train is None else list_patterns(train), list_patterns(freeze)
    if train is None and read_metadata(proto, INPUTS) and not read_metadata(proto, ADAPTERS):
        raise ValueError(
            f"the model is a base whose adapters are inputs, and has no weight to train: "
            f"{named('add_lora')} puts new adapters in their place, and load_adapter the adapters "
            "of a file"
        )
    floats = float_constants(proto)
    if train is not None and set(floats).issuperset([*train, *freeze]):
        names = [name for name in floats if name in train and name not in freeze]
    else:
        rows = default_rows(proto)
        if train is None and not rows.trained:
            return default_weights(proto)  # raises the error that no constant is a weight
        rows = apply_choice(rows, train, freeze)
        announce_choice(rows)
        names = [t.name for t in rows if t.trains]
    if not names:
        chosen = f"{argument('train', train)}, {argument('freeze', freeze)}"
        raise ValueError(
            f"nothing is left to train with {chosen}: name weights to train that are not frozen"
        )
    return names


def choose_and_separate(
    proto: ModelProto, train: Patterns | None, freeze: Patterns, statistics: bool
) -> tuple[ModelProto, list[str]]:
    """Return the model to train, without merged parameters, and the names of the weights to train.

    Parameters that an exporter stored as one tensor become several tensors if one of them trains,
    or if there are running `statistics` to update. Weights stored as integers that `train` names
    become floats that a QuantizeLinear rounds.

    Raises:
        ValueError: as `choose_weights`, or `train` names a constant that holds no floats.
    """
    proto, train, freeze = named_integers_as_floats(proto, train, freeze)
    separated = separate_merged(proto)
    _require_float_elements(separated, list_patterns(() if train is None else train))
    names = choose_weights(separated, train, freeze)
    return (separated if shares_tensors(proto, separated, names) or statistics else proto), names


def float_constants(proto: ModelProto) -> list[str]:
    """Return the names of the float constants of a model, in the order of the graph."""
    return [ref.name for ref in constant_refs(proto) if ref.read().data_type in FLOATS]


def matching_weights(proto: ModelProto, patterns: Patterns, kind: str) -> list[str]:
    """Return the names of the float constants that patterns match, in the order of the graph.

    Patterns match names and aliases, see `trainable`. `kind` is the noun for a pattern in messages.

    Raises:
        ValueError: a pattern matches no constant; the message lists close names.
    """
    chosen = set(expand_patterns(proto, patterns, kind))
    return [name for name in float_constants(proto) if name in chosen]


def expand_patterns(
    proto: ModelProto, patterns: Patterns, kind: str, weights_first: bool = True
) -> list[str]:
    """Return the names of the constants that patterns match, in the order of the patterns.

    No name is repeated. With `weights_first`, a pattern that matches weights matches only weights.
    A name of a constant that has no floats is returned, too.

    Raises:
        ValueError: as `matching_weights`.
    """
    patterns = list_patterns(patterns)
    exact = {ref.name for ref in constant_refs(proto)}
    rows = [] if exact.issuperset(patterns) else default_rows(proto)
    names: dict[str, None] = {}
    for pattern in patterns:
        matched = [] if pattern in exact else matching_tensors(rows, pattern, kind, weights_first)
        names |= dict.fromkeys([t.name for t in matched] or [pattern])
    return list(names)


def _require_float_elements(proto: ModelProto, names: Collection[str]) -> None:
    """Raise `ValueError` if a constant among `names` has elements that are no floats."""
    for ref in constant_refs(proto) if names else ():
        if ref.name in names and (code := ref.read().data_type) not in FLOATS:
            dtype = ir.DataType(code).name.lower()
            raise ValueError(
                f"{ref.name!r} has elements of {dtype}, and only floats train. A quantized weight "
                "does not change: train adapters beside it (add_lora), a new head (replace_head) "
                "or biases"
            )


Patterns = str | Iterable[str]


def list_patterns(patterns: Patterns) -> list[str]:
    """Return patterns as a list; a string is one pattern."""
    return [patterns] if isinstance(patterns, str) else list(patterns)


def matching_tensors(
    rows: Sequence[Tensor], pattern: str, kind: str, weights_first: bool = True
) -> list[Tensor]:
    """Return the tensors among `rows` that `pattern` matches, in the order of `rows`.

    A tensor with that name is returned first, else with that alias, else for "last" the weights of
    the last layer, else the tensors whose name or alias the pattern of `fnmatch` matches. With
    `weights_first`, a pattern that matches a weight matches only weights: "layer4.*" does not mean
    the constants in formulas of layer4.

    Raises:
        ValueError: the pattern matches no tensor; the message lists close names and aliases. `kind`
            is the noun for the pattern in the message.
    """
    for exact in ([t for t in rows if t.name == pattern], [t for t in rows if t.alias == pattern]):
        if exact:
            return exact
    if pattern == LAST:
        if last := [t for t in rows if t.is_last]:
            return last
        raise ValueError(
            f"{kind} {LAST!r}: the last layer has no weights in floats: name weights of another "
            "layer"
        )
    matched = [t for t in rows if any(fnmatchcase(name, pattern) for name in t.names)]
    if not matched:
        ordered = sorted(rows, key=lambda t: not t.is_weight)
        names = [name for t in ordered for name in reversed(t.names)]
        raise unknown(kind, pattern, names, _similar_names(pattern, names))
    weights = [t for t in matched if t.is_weight] if weights_first else []
    return weights or matched


def apply_choice(rows: Tensors, train: Patterns | None, freeze: Patterns) -> Tensors:
    """Return the tensors with `trains` and `why` set by the arguments `train` and `freeze`.

    Raises:
        ValueError: a pattern that matches no tensor.
    """
    patterns = [] if train is None else list_patterns(train)
    named = _pattern_by_tensor_name(rows, patterns, "train")
    frozen = _pattern_by_tensor_name(rows, list_patterns(freeze), "freeze", weights_first=False)
    chosen = Tensors()
    for t in rows:
        if t.name in frozen:
            why = f"frozen by {argument('freeze', frozen[t.name])}; {t.why}"
            t = replace(t, trains=False, why=printable(why), doubtful=False)
        elif t.name in named:
            why = f"named by {argument('train', named[t.name])}; {t.why}"
            t = replace(t, trains=True, why=printable(why), doubtful=False)
        elif train is not None:
            why = f"not named by {argument('train')}; {t.why}" if t.is_weight else t.why
            left = t.doubtful and any(fnmatchcase(n, p) for n in t.names for p in patterns)
            t = replace(t, trains=False, why=why, doubtful=left)
        chosen.append(t)
    return chosen


def _pattern_by_tensor_name(
    rows: Tensors, patterns: Sequence[str], option: str, weights_first: bool = True
) -> dict[str, str]:
    """Return `{tensor name: first pattern of the argument `option` that matches the tensor}`."""
    kind = f"weight ({argument(option)})"
    return {
        t.name: pattern
        for pattern in reversed(patterns)
        for t in matching_tensors(rows, pattern, kind, weights_first)
    }


def _similar_names(pattern: str, names: Sequence[str]) -> list[str]:
    """Return up to three of `names` with parts between dots that resemble `pattern`."""
    text = re.sub(r"[*?]+", "*", pattern).strip("*./").lower()
    parts: dict[str, str] = {}
    count = len(re.split(r"[./]", text))
    for name in names:
        split = re.split(r"[./]", name.lower())
        for i in range(len(split) - count + 1):
            parts.setdefault(".".join(split[i : i + count]), name)
    close = difflib.get_close_matches(text.replace("/", "."), parts, n=3, cutoff=0.6)
    return [parts[part] for part in close]


def named_integers_as_floats(
    proto: ModelProto, train: Patterns | None, freeze: Patterns
) -> tuple[ModelProto, Patterns | None, Patterns]:
    """Return a model in which the stored integers that `train` names are floats, rounded in the
    graph.

    Also return `train` and `freeze` with the names of the float weights. The arguments name a
    weight by its integers in the file, or by its floats. Without `train`, the integers stay.
    """
    if train is None:
        return proto, train, freeze
    train, freeze = list_patterns(train), list_patterns(freeze)
    found = stored_weights(proto)
    chosen = {
        entry.tensor.name: entry.weight
        for entry in found
        if _matches_stored_weight(entry, train) and not _matches_stored_weight(entry, freeze)
    }
    if not chosen:
        return proto, train, freeze
    model = store_floats(proto, chosen, {})
    return model, [chosen.get(name, name) for name in train], freeze


def _matches_stored_weight(entry: StoredWeight, patterns: list[str]) -> bool:
    """Return whether a pattern matches the name of the integers, or of the floats, of a stored
    weight.
    """
    names = entry.tensor.name, entry.weight
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)
