"""A model in training: its trainer, and a session that predicts; pickled without sessions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from onnx import ModelProto

from onnxgrad.data.columns import Names, column_names
from onnxgrad.data.field import Field
from onnxgrad.graph.infer import infer
from onnxgrad.model.convert import to_ir
from onnxgrad.model.feeds import names_without_default
from onnxgrad.model.surgery import select_model_inputs_outputs
from onnxgrad.operators.shapes import dims
from onnxgrad.runtime.predictor import Predictor
from onnxgrad.runtime.session import WORK_PER_THREAD, count_multiply_adds
from onnxgrad.sklearn.front import Front, by_name, raw_array
from onnxgrad.sklearn.head import Head
from onnxgrad.training.callbacks.base import Callbacks
from onnxgrad.training.trainer import Trainer

_ROWS = 1024  # of a call of the runtime
_FEW = 2 * WORK_PER_THREAD  # multiply-adds of a call for which one thread is enough


class Network:
    """A model in training.

    Args:
        proto: the model.
        head: what it says of its end.
        arguments: those of its `Trainer`, without callbacks.
        raw: whether data hold text, or lack values: then a frozen part in front of what trains runs
            once, see `Front`.

    Attributes:
        from_logits: whether the target holds scores, not probabilities; None if the loss does not
            say, or before training.
    """

    def __init__(
        self, proto: ModelProto, head: Head, arguments: dict[str, Any], raw: bool = False
    ) -> None:
        self.head, self.arguments = head, arguments
        self.from_logits: bool | None = None
        self.front = Front(proto, head.target, arguments) if raw else None
        chosen = {"train": self.front.trained, "freeze": ()} if self.front else {}
        self.trainer = Trainer(self.front.rest if self.front else proto, **arguments | chosen)
        # estimators of scikit-learn show progress by their argument `verbose` only
        self.trainer._change_job(shows_progress=False)
        self._encoder: RowPredictor | None = None
        self._predictor: RowPredictor | None = None

    def train(self, further: bool, X: Any, y: Any, callbacks: Any, **options: Any) -> None:
        """Train: `fit` of the trainer, or `partial_fit` with `further`, on encoded labels."""
        if self.front is not None:
            if self._encoder is None:
                device = self.arguments["device"]
                self._encoder = RowPredictor(self.front.part, self.front.cuts, device, raw=True)
            X = self._encoder(X)
        trainer, self._predictor = self.trainer, None
        trainer._change_job(callbacks=Callbacks(callbacks))
        (trainer.partial_fit if further else trainer.fit)(X, y, **options)
        infos = () if trainer._call is None else trainer._call.labels.values()
        self.from_logits = next((info.from_logits for info in infos), None)

    @property
    def model(self) -> ModelProto:
        """The trained model, with the names of columns."""
        model = self.trainer.model
        model = self.front.merge(model) if self.front else model
        self.trainer._names.keep(model)
        return model

    def take_names(self, columns: Sequence[str], target: Sequence[str]) -> None:
        """Let the trained model store the names of the columns of inputs and labels."""
        whole, names = (
            self.front.whole if self.front else self.trainer._job.proto,
            self.trainer._names,
        )
        inputs = names_without_default(whole)
        names.columns |= names.by_input(columns, inputs) if columns else {}
        names.target = list(target) or names.target

    def run(self, X: Any) -> dict[str, np.ndarray]:
        """Return the target, and the labels if the model has an output of them."""
        if self._predictor is None:
            raw, device = self.front is not None, self.arguments["device"]
            self._predictor = RowPredictor(self.model, self.head.tensors, device, raw)
        return self._predictor(X)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_predictor": None, "_encoder": None}


class RowPredictor:
    """Computes tensors of a model for data of any number of rows.

    Args:
        proto: the model.
        outputs: names of tensors of the graph.
        device: where to run.
        raw: whether data may hold text, or lack values.
    """

    def __init__(
        self, proto: ModelProto, outputs: Sequence[str], device: Any, raw: bool = False
    ) -> None:
        self.raw, self.outputs = raw, list(outputs)
        proto = select_model_inputs_outputs(proto, outputs)
        model = to_ir(proto)
        infer(model)
        self.fields = [Field.of(x) for x in model.graph.inputs if x.dtype]
        first = [shape[0] for x in model.graph.inputs if (shape := dims(x))]
        self.fixed_rows = next((d for d in first if isinstance(d, int) and d > 0), 0)
        self._device, self._work = device, count_multiply_adds(model.graph)
        self._predictors: dict[bool, Predictor] = {}
        self._proto = proto
        if self._work >= _FEW:  # the only session: large weights are not kept twice
            self._predictor_for(1)
            self._proto = ModelProto()

    def __call__(self, X: Any) -> dict[str, np.ndarray]:
        """Return the tensors, by name.

        Raises:
            ValueError: data that an input does not accept.
        """
        fed = self._feeds(X)
        rows = len(next(iter(fed.values())))
        predictor = self._predictor_for(min(rows, self.fixed_rows or _ROWS))
        if predictor.fixed_rows or not 0 < rows <= _ROWS:
            return predictor.predict(fed, _ROWS)
        try:  # a row takes less time: it is checked
            found = predictor.session.run(self.outputs, fed)
        except Exception:  # of several types; the file may take one row at a time
            return predictor.predict(fed, _ROWS)
        return dict(zip(self.outputs, found, strict=True))

    def _predictor_for(self, rows: int) -> Predictor:
        """Return what runs calls of `rows` rows: a few may not be worth another thread."""
        few = self._work * rows < _FEW
        if few not in self._predictors:
            most = 0.0 if few else self._work * (self.fixed_rows or _ROWS)
            arguments = self._proto, self.outputs, self._device, self.fixed_rows, most
            self._predictors[few] = Predictor(*arguments)
        return self._predictors[few]

    def _feeds(self, X: Any) -> dict[str, np.ndarray]:
        names = [field.name for field in self.fields]
        columns: Mapping[str, Any] = X
        if not by_name(X):
            if len(names) == 1:
                columns = {names[0]: X}
            elif (own := column_names(X)) is None:
                raise ValueError(f"the model has the inputs {names}: pass a table of these columns")
            else:
                groups = Names().by_input(own, names)
                columns = {name: X[group[0]] for name, group in groups.items()}
        read = raw_array if self.raw else Field.check
        return {field.name: read(field, columns[field.name]) for field in self.fields}
