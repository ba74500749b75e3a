"""Weights of classes in a loss: given by names or numbers of classes, or balanced by labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxgrad.checks import check_choice
from onnxgrad.data.class_numbers import labels_outside
from onnxgrad.errors import argument, named
from onnxgrad.losses.info import LossInfo
from onnxgrad.losses.objectives import takes_class_weight
from onnxgrad.training.batches import BatchSource


@dataclass(frozen=True)
class WeightedClasses:
    """The argument `class_weight` of a trainer, parts of which labels may have to tell.

    - `given`: the weights that are known without labels, by output if losses are by output.
    - `balanced`: the outputs whose classes are balanced, empty for all that have classes; None if
      no classes are balanced.
    - `by_output`: whether losses are by output.
    """

    given: Any
    balanced: list[str] | None
    by_output: bool

    @classmethod
    def of(cls, weight: Any, loss: Any) -> WeightedClasses:
        """Return the weights of classes for the arguments `class_weight` and `loss` of a trainer.

        Raises:
            ValueError: another text than "balanced", or no loss takes weights of classes.
        """
        by_output = isinstance(loss, Mapping)
        if isinstance(weight, str):
            check_choice("class_weight", weight, ["balanced"])
            outputs = [name for name in loss if takes_class_weight(loss[name])] if by_output else []
            if by_output and not outputs:
                raise ValueError(
                    f"{named('class_weight')} has no effect on these losses: leave it out"
                )
            return cls(None, outputs, by_output)
        if not isinstance(weight, Mapping):
            return cls(weight, None, by_output)
        outputs = [name for name, value in weight.items() if isinstance(value, str)]
        for name in outputs:
            check_choice(f"class_weight[{name!r}]", weight[name], ["balanced"])
        given = {name: value for name, value in weight.items() if name not in outputs}
        return cls(given, outputs or None, by_output)

    def with_balanced(self, balanced: Mapping[str, dict[int, float]] | None) -> Any:
        """Return all weights by number, with the weights that `balance` returned."""
        if self.balanced is None:
            return self.given
        if not self.by_output:
            return next(iter((balanced or {}).values()), None)
        return {**(self.given or {}), **(balanced or {})}

    def balance(
        self, source: BatchSource, labels: Mapping[str, LossInfo]
    ) -> dict[str, dict[int, float]]:
        """Return weights that are inversely proportional to the frequencies of classes.

        The weight of a class is n / (k n_c) for n labels of k classes, n_c of them of class c, as
        scikit-learn's `class_weight="balanced"`. Labels that are ignored or NaN do not count.

        Args:
            source: the batches to train on; unless they are arrays, all labels are read.
            labels: the facts of the loss, by label input.

        Returns:
            `{class: weight}` by output.

        Raises:
            ValueError: no label is a class, or the labels are no class indices.
        """
        given, outputs = argument("class_weight", "balanced"), self.balanced or []
        infos = {
            name: info
            for name, info in labels.items()
            if (info.classes, info.threshold) != (None, None)
            and (not outputs or info.prediction in outputs)
        }
        if not infos or len(infos) < len(outputs):
            raise ValueError(f"{given} needs labels that are numbers of classes: pass the weights")
        counts: dict[str, dict[int, int]] = {name: {} for name in infos}
        for piece in source.label_batches():
            for name, info in infos.items():
                array = np.asarray(piece[name])
                counted = array[(array != info.ignore_index) & (array == array)]  # NaN is no label
                values, numbers = np.unique(counted, return_counts=True)
                if labels_outside(values).any():
                    raise ValueError(f"{given} needs class indices in {name!r}: pass the weights")
                for value, number in zip(values.tolist(), numbers.tolist(), strict=True):
                    counts[name][int(value)] = counts[name].get(int(value), 0) + number
        return {
            str(infos[name].prediction): {
                c: sum(own.values()) / (len(own) * n) for c, n in sorted(own.items())
            }
            for name, own in counts.items()
        }
