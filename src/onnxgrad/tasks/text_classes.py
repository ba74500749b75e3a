"""`TextClasses`: the base of tasks on texts with classes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import onnx

import onnxgrad as og
from onnxgrad.errors import unknown
from onnxgrad.tasks.base import (
    Task,
    as_proto,
    configured_classes,
    find_tokenizer,
    folder_of_model,
    input_shapes,
    output_shapes,
    stored_classes,
    with_classes,
)

BATCH = 32  # rows in one call of the runtime
_POOLS = ("mean", "first", "none")
_HIDDEN = "last_hidden_state"
# the class names that transformers writes if the user gave none
_UNNAMED = re.compile(r"LABEL_\d+")


class TextClasses(Task):
    """The base of tasks on texts whose model scores classes on the last axis of its output.

    Subclasses say how rows are read.
    """

    _score_axes: ClassVar[int]  # number of axes of the scores: 2 for texts, 3 for tokens

    def _read_texts(self, source: Any, classes: Sequence[str] | None, **options: Any) -> Any:
        """Return a reader of texts with labels; if `classes` is None, it finds the class names."""
        raise NotImplementedError

    def _prepare_data_and_model(
        self, model: Any, data: Any, tokenizer: Any, classes: Sequence[str] | None, **head: Any
    ) -> None:
        """Read the rows to train on, choose the classes, and add a layer of classes to the
        model.
        """
        self.model = proto = as_proto(model)
        home = folder_of_model(model)
        self._tokenizer = find_tokenizer(tokenizer, home)
        known = stored_classes(proto) or configured_classes(proto, home)
        self.classes = list(map(str, classes or known))
        if self._score_axes == 2 and all(map(_UNNAMED.fullmatch, known)):
            known = []
        rows = None if data is None else self._read_texts(data, classes, known=known)
        self.classes = self.classes if rows is None else list(rows.classes)
        if not self.classes:
            raise ValueError("neither the data nor the model names the classes: pass classes=")
        self.model = self._with_class_head(proto, known, **head)
        if rows is not None:
            self.model = with_classes(self.model, self.classes)
            self.data = rows.for_inputs(input_shapes(self.model))

    def read(self, path: Any) -> og.data.Reader:
        """Return a reader of further texts with the same classes, from any source that `data` may
        be.

        Raises:
            ValueError: as for `data`, or a label that is no class.
        """
        return self._read_texts(path, self.classes).for_inputs(input_shapes(self.model))

    def _with_class_head(
        self,
        proto: onnx.ModelProto,
        known: Sequence[str],
        at: str | None,
        seed: int,
        pool: str | None = None,
    ) -> onnx.ModelProto:
        """Return the model with scores of the classes as its only output."""
        if pool not in (None, *_POOLS):
            raise unknown("pool", pool, [*_POOLS, "None"])
        outputs, of_texts = output_shapes(proto), self._score_axes == 2
        if at is None and (known or "logits" in outputs):
            name = "logits" if "logits" in outputs else next(iter(outputs))
            shape = outputs[name]
            if pool is not None:
                raise ValueError(
                    f"pool={pool!r} is for features, and the output {name!r} has scores: leave out "
                    "pool=, or name an output of features with at="
                )
            if of_texts and len(shape) != 2:
                raise ValueError(
                    f"the output {name!r} has the shape {list(shape)}, and scores of texts have "
                    "(rows, classes): name an output of features with at="
                )
            if len(outputs) > 1:
                proto = og.graph.select_model_inputs_outputs(proto, [name])
            unnamed = of_texts and not known and shape[1] == len(self.classes)
            if unnamed or [*known] == self.classes:
                return proto
            return og.replace_head(proto, self.classes, activation=None, seed=seed)
        at = at or self._feature_output(outputs)
        of_tokens = len(outputs.get(at, (None,) * 3)) == 3
        pool = (pool or ("mean" if of_tokens else "none")) if of_texts else "none"
        masked = pool == "mean" and "attention_mask" in input_shapes(proto)
        return og.add_head(
            proto,
            self.classes,
            at,
            pool=None if pool == "none" else pool,
            mask="attention_mask" if masked else None,
            seed=seed,
        )

    def _feature_output(self, outputs: Mapping[str, tuple[int | None, ...]]) -> str:
        """Return the name of the encoder's output whose features a new layer of classes reads.

        If several outputs fit, it is `last_hidden_state`, and a note says so.

        Raises:
            ValueError: several outputs fit, and none is called `last_hidden_state`.
        """
        by_axes = {axes: [n for n, d in outputs.items() if len(d) == axes] for axes in (3, 2)}
        if _HIDDEN in outputs:
            fitting = [*by_axes[3], *by_axes[2] * (self._score_axes == 2)]
            if others := [name for name in fitting if name != _HIDDEN]:
                self.notes = [
                    *self.notes,
                    f"the layer of classes reads the output {_HIDDEN!r}; {others} would fit, too: "
                    "name one with at=",
                ]
            return _HIDDEN
        found = by_axes[3] or by_axes[2] * (self._score_axes == 2)
        if len(found) != 1:
            raise ValueError(
                f"the features of texts may be any of the outputs {[*outputs]}: name one with at="
            )
        return found[0]
