"""A weighted sum of several losses of one prediction."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from itertools import chain
from math import isfinite
from typing import Any

from onnxgrad.errors import unknown
from onnxgrad.losses.formulas import LOSSES
from onnxgrad.losses.spec import LossSpec, Terms
from onnxgrad.operators.shapes import rank

_SHARED = ("from_logits", "axis", "ignore_index", "ignore_nan", "soft_labels", "shift")


def combined_loss(
    factors: Mapping[str, float], options: Mapping[str, Mapping[str, Any]] | None = None
) -> LossSpec:
    """sum_k f_k l_k over losses l_k of the same prediction and labels, with factors f_k.

    If some losses are of elements and others of rows, such as `cross_entropy` and `softmax_dice`,
    the loss of a row is added to each of its elements, and the mean is over the elements that are
    not ignored: a row counts by their number. Where none is ignored, it is the sum of both means.
    The weights of elements, as by `class_weight`, come from the first loss of elements.

    Args:
        factors: `{name: factor}`, names of `LOSSES`: of classes (cross_entropy, softmax_focal,
            softmax_dice), or of scores of two classes (binary_cross_entropy, focal, dice).
        options: options by name, `{"softmax_focal": {"gamma": 1.5}}`. Options that all losses have
            in common, as `ignore_index`, are options of the result: `loss_options` of a `Trainer`.

    Raises:
        ValueError: an unknown loss or option, losses of both kinds, or none.

    Examples:
        >>> import onnxgrad as og
        >>> og.losses.combined_loss({"cross_entropy": 1, "softmax_dice": 0.5}).name
        'cross_entropy + 0.5 softmax_dice'
    """
    specs, two = _configure_combined_losses(factors, options or {})
    if len(specs) == 1 and [*factors.values()] == [1]:
        return next(iter(specs.values()))

    def weighted_sum(op: Any, prediction: Any, label: Any, **shared: Any) -> Terms:
        own = [spec.with_options({**spec.options, **shared}) for spec in specs.values()]
        terms = [spec.terms(op, prediction, label) for spec in own]
        return _sum_loss_terms(op, terms, [*factors.values()])

    def formula_of_classes(op, prediction, label, from_logits=True, ignore_index=-100, axis=None):
        options = {"ignore_index": ignore_index, "axis": axis}
        return weighted_sum(op, prediction, label, from_logits=from_logits, **options)

    def formula_of_two_classes(op, prediction, label, from_logits=True, ignore_nan=False):
        return weighted_sum(op, prediction, label, from_logits=from_logits, ignore_nan=ignore_nan)

    title = " + ".join(n if f == 1 else f"{f:g} {n}" for n, f in factors.items())
    base = LOSSES["focal" if two else "softmax_focal"]
    return replace(base, formula=formula_of_two_classes if two else formula_of_classes, name=title)


def _configure_combined_losses(
    factors: Mapping[str, float], options: Mapping[str, Mapping[str, Any]]
) -> tuple[dict[str, LossSpec], bool]:
    """Return (losses by name, whether these losses take one score for two classes), after checking
    factors and options.
    """
    kinds = {name: kind for name, spec in LOSSES.items() if (kind := _prediction_kind(spec))}
    for name, factor in factors.items():
        if name not in kinds:
            raise unknown("loss", name, kinds)
        if not isfinite(factor):
            raise ValueError(f"the factor of {name!r} must be a finite number, not {factor}")
    if other := {*options} - {*factors}:
        raise ValueError(f"options name {sorted(other)}: name losses of {[*factors]} instead")
    if len({kinds[name] for name in factors}) != 1:
        raise ValueError(
            f"{[*factors]}: combine losses of several classes, or losses of two classes, not both"
        )
    if shared := {*chain(*options.values())} & {*_SHARED}:
        raise ValueError(
            f"{sorted(shared)} are options of all losses together: set them by loss_options of a "
            "Trainer"
        )
    specs = {name: LOSSES[name].with_options(options.get(name, {})) for name in factors}
    return specs, kinds[next(iter(factors))] == "two classes"


def _sum_loss_terms(op: Any, terms: Sequence[Terms], factors: Sequence[float]) -> Terms:
    """Write the sum of losses times their factors; the loss of a row is added to each element of
    the row.
    """
    ranks = [rank(one.losses) or 1 for one in terms]
    each = []
    for one, n, factor in zip(terms, ranks, factors, strict=True):
        behind = list(range(n, max(ranks)))
        losses = op.Unsqueeze(one.losses, behind) if behind else one.losses
        each.append(losses if factor == 1 else losses * float(factor))
    return replace(terms[ranks.index(max(ranks))], losses=reduce(operator.add, each))


def _prediction_kind(spec: LossSpec) -> str | None:
    """Return "classes" or "two classes", by the predictions that a loss takes; None if it cannot be
    combined with other losses.
    """
    if spec.activation == "Sigmoid":
        return "two classes"
    by_class = "axis" in spec.all_options and spec.has_ignore_index
    maps = by_class and spec.label_kind.shape(("N", 2, "H", "W")) == ("N", "H", "W")
    return "classes" if maps else None
