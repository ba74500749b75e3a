"""`trainable`: which constants of a model train, by default or as arguments say, and why."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import replace

from onnx import ModelProto

from onnxgrad.errors import named, printable
from onnxgrad.model.notes import HEAD, fine_tuned, read_note
from onnxgrad.model.read import ModelLike, read
from onnxgrad.model.traversal import nodes_of
from onnxgrad.reporting import frames_inside, logger
from onnxgrad.training.parameters.aliases import read_aliases
from onnxgrad.training.parameters.equal_constants import separate_merged, warn_of_merged
from onnxgrad.training.parameters.integer_rows import integer_rows
from onnxgrad.training.parameters.named_integers import with_named_integers
from onnxgrad.training.parameters.patterns import choose, matching
from onnxgrad.training.parameters.roles import QUANTIZED
from onnxgrad.training.parameters.table import (
    LISTED,
    Tensor,
    Tensors,
    more,
    names_and_reasons,
    quoted_name,
)
from onnxgrad.training.parameters.ties import copies
from onnxgrad.training.parameters.verdicts import judge

# why a model has nothing to train: operators that learn without gradients
_WITHOUT_GRADIENT = {
    (
        "is an operator that onnxruntime does not have, so that the model does not run: select "
        "outputs in front of it, or use another classifier than the GaussianProcessClassifier of "
        "scikit-learn"
    ): ("Solve",),
    (
        "decides by thresholds, which have no gradient: trees of scikit-learn, LightGBM, XGBoost "
        "and CatBoost are trained by these libraries. As a part of a larger model, trees stay as "
        "they are, and the layers behind them train"
    ): ("TreeEnsemble", "TreeEnsembleRegressor", "TreeEnsembleClassifier"),
    (
        "selects the nearest of stored rows: such a model is its data, and is fitted by storing "
        "others"
    ): ("TopK",),
}

__all__ = ["Tensor", "Tensors", "default_weights", "names_and_reasons", "trainable"]


def trainable(
    model: ModelLike,
    train: str | Iterable[str] | None = None,
    freeze: str | Iterable[str] = (),
    *,
    pattern: str | None = None,
) -> Tensors:
    """Return the float constants of `model`, which of them train, and why; and quantized weights.

    Without `train`, a tensor trains if its role in the graph is that of a weight: factor of a
    product with data, bias added to one, scale or bias of a normalization, table of an embedding,
    and so on. Masks, running statistics, tables of sines, scales of attention or of images and
    other constants of formulas do not. In a model with adapters, the adapters train, and a new head
    beside them. `Trainer` takes the same `train` and `freeze`.

    Args:
        model: model, serialized model or path; not modified.
        train: names and patterns of `fnmatch`, as "layer4.*", of those that train. A pattern
            chooses among weights; a constant of another role trains if its name is listed. None:
            those that train by default.
        freeze: names and patterns of those that do not train, also if `train` names them.
        pattern: returns only the tensors whose name or alias matches it.

    Returns:
        A list of tensors in the order of the graph, quantized weights last, with attributes `name`,
        `alias`, `shape`, `dtype`, `size`, `trains` and `why`. It prints as a table; so do its
        attributes `trained` and `frozen`, and slices. Where an exporter numbered a weight, as
        `onnx::MatMul_137`, the alias is its name in its module, as `encoder.query.weight`; `train`,
        `freeze` and `pattern` match it, too. That of a quantized weight is the name or alias of
        its floats.

    Raises:
        ModelError: `model` cannot be read, or computes with maps.
        ValueError: a name or pattern that matches nothing; the message lists close ones.

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
    proto, train, freeze = with_named_integers(read(model), train, freeze)
    separated = separate_merged(proto)
    rows = choose(default_rows(separated), train, freeze)
    rows.extend(integer_rows(separated))
    if pattern is not None:
        kept = {t.name for t in matching(rows, pattern, "weight (pattern=)", weights_first=False)}
        rows = Tensors(t for t in rows if t.name in kept)
    return rows


def default_rows(proto: ModelProto) -> Tensors:
    """Return the float constants, and which of them train by default."""
    graph, judged = judge(proto)
    names, tied = read_aliases(graph, judged), copies(proto, graph, judged)
    adapted = fine_tuned(proto)
    head = read_note(proto, HEAD)
    rows = Tensors()
    for row in judged:
        trains, why, doubtful = row.trains, row.why, row.doubtful
        if row.name in tied:
            why = f"{why}; a copy of {tied[row.name]!r}"
        if adapted:
            trains, doubtful = row.name in adapted, False
            of_adapters = "the new head beside adapters" if row.name in head else "an adapter"
            why = of_adapters if trains else f"frozen: the model has adapters ({why})"
        rows.append(
            replace(
                row,
                trains=trains,
                why=printable(why),
                doubtful=doubtful,
                alias=names.get(row.name, ""),
                is_weight=row.trains or trains,
                copy_of=tied.get(row.name, ""),
            )
        )
    return rows


def default_weights(proto: ModelProto, announce: bool = False, needed: bool = True) -> list[str]:
    """Return the names of the weights that train by default.

    With `announce`, each float constant that does not train is logged with the reason, and a
    warning names uncertain ones: single numbers that may be learned, large tensors, copies, and
    parameters that are one tensor.

    Raises:
        ValueError: weights are `needed`, and none of the float constants trains.
    """
    if announce:
        warn_of_merged(proto)
    return trained_names(proto, default_rows(proto), announce, needed)


def trained_names(
    proto: ModelProto, rows: Tensors, announce: bool = False, needed: bool = True
) -> list[str]:
    """Return the names of the rows of `proto` that train, see `default_weights`."""
    names = [t.name for t in rows if t.trains]
    if not names and any(t.why.startswith(QUANTIZED) for t in rows):
        return [t.name for t in rows]  # the sweep raises an error that explains why
    if not names and needed:
        why = _untrainable(proto)
        if not rows:
            raise ValueError(f"the model has no float constants to train{why and ': '}{why}")
        raise ValueError(
            f"none of the float constants is a weight by its role: {names_and_reasons(rows)}. "
            f"{why}{why and '. '}Name those to train"
        )
    if announce:
        announce_choice(rows)
    return names


def announce_choice(rows: Tensors) -> None:
    """Log what does not train, and warn about uncertain decisions and about copies of a weight."""
    untrained = rows.frozen
    if untrained:
        logger.info("not trained: %s", names_and_reasons(untrained, len(untrained)))
    doubtful = [t for t in rows if t.doubtful]
    if doubtful:
        decisions = "; ".join(
            f"{quoted_name(t)} {'trains' if t.trains else 'does not train'}: {t.why}"
            for t in doubtful[:LISTED]
        )
        message = f"{decisions}{more(doubtful)}. {named('List the weights')} to choose otherwise"
        warnings.warn(message, stacklevel=frames_inside() + 1)
    trained = {t.name for t in rows.trained}
    copied = [t for t in rows if t.copy_of and {t.name, t.copy_of} & trained]
    if copied:
        pairs = "; ".join(f"{quoted_name(t)} and {printable(t.copy_of)!r}" for t in copied[:LISTED])
        message = f"{pairs}{more(copied)}: the exporter stored a shared weight twice, and these "
        message += "copies part in training: tie_copies(model) makes them one tensor"
        warnings.warn(message, stacklevel=frames_inside() + 1)


def _untrainable(proto: ModelProto) -> str:
    """Return the first node that learns without gradients and the reason, or an empty text."""
    for reason, op_types in _WITHOUT_GRADIENT.items():
        for node in nodes_of(proto):
            if node.op_type in op_types:
                name = f" {printable(node.name)!r}" if node.name else ""
                return f"{node.op_type}{name} {reason}"
    return ""
