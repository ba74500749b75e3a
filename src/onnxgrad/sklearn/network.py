"""`Network`: a model in training, with its trainer. `RowPredictor`: runs a model on any X."""

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
from onnxgrad.runtime.predictor import MANY_ROWS, Predictor
from onnxgrad.runtime.session import count_multiply_adds, work_of_calls
from onnxgrad.sklearn.frozen_part import FrozenPart, array_with_text_or_nan, is_input_dict
from onnxgrad.sklearn.head import Head
from onnxgrad.training.callbacks.base import Callbacks
from onnxgrad.training.trainer import Trainer


class Network:
    """A model in training with its `Trainer`; pickling leaves out sessions of onnxruntime.

    Args:
        proto: the model.
        head: the end of the model.
        arguments: the arguments of its `Trainer`, without callbacks.
        raw: whether data hold text or NaN: then the encoders in front of the layers that train run
            once, see `FrozenPart`.

    Attributes:
        from_logits: whether the target holds scores, not probabilities; None before training, and
            for a loss that takes neither.
    """

    def __init__(
        self, proto: ModelProto, head: Head, arguments: dict[str, Any], raw: bool = False
    ) -> None:
        self.head, self.arguments = head, arguments
        self.from_logits: bool | None = None
        self.front = FrozenPart(proto, head.target, arguments) if raw else None
        chosen = {"train": self.front.trained, "freeze": ()} if self.front else {}
        self.trainer = Trainer(self.front.rest if self.front else proto, **arguments | chosen)
        self.trainer._change_job(shows_progress=False)  # printed only if `verbose`
        self._encoder: RowPredictor | None = None
        self._predictor: RowPredictor | None = None

    def train(self, further: bool, X: Any, y: Any, callbacks: Any, **options: Any) -> None:
        """Train on X and encoded labels y, by `Trainer.partial_fit` if `further`, else by
        `Trainer.fit`.
        """
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
        """The trained ONNX model, whose metadata store the names of the columns."""
        model = self.trainer.model
        model = self.front.merge(model) if self.front else model
        self.trainer._names.write_metadata(model)
        return model

    def remember_column_names(self, columns: Sequence[str], target: Sequence[str]) -> None:
        """Remember the column names of inputs and labels, which the trained model stores."""
        names = self.trainer._names
        if columns:
            whole = self.front.whole if self.front else self.trainer._job.proto
            names.columns |= names.columns_by_input(columns, names_without_default(whole))
        names.target = list(target) or names.target

    def run(self, X: Any) -> dict[str, np.ndarray]:
        """Return {tensor: values for X} of the tensor that the loss reads, and of the label output
        if it exists.
        """
        if self._predictor is None:
            raw, device = self.front is not None, self.arguments["device"]
            self._predictor = RowPredictor(self.model, self.head.tensor_names, device, raw)
        return self._predictor(X)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_predictor": None, "_encoder": None}


class RowPredictor:
    """Computes tensors of a model for X of any row count.

    Args:
        proto: the model.
        outputs: names of tensors of the graph.
        device: where to run.
        raw: whether data may hold text or NaN.
    """

    def __init__(
        self, proto: ModelProto, outputs: Sequence[str], device: Any, raw: bool = False
    ) -> None:
        self.raw, self.outputs = raw, list(outputs)
        proto = select_model_inputs_outputs(proto, outputs)
        model = to_ir(proto)
        infer(model)
        self.fields = [Field.from_input(x) for x in model.graph.inputs if x.dtype]
        first = [shape[0] for x in model.graph.inputs if (shape := dims(x))]
        self.fixed_rows = next((d for d in first if isinstance(d, int) and d > 0), 0)
        self._device, self._work = device, count_multiply_adds(model.graph)
        self._predictors = dict[float, Predictor]()  # by their multiply-adds
        self._proto = proto
        if work_of_calls(
            self._work, 1, 1
        ):  # one session runs all row counts, and holds the weights
            self._predictor_of_row_count(1)
            self._proto = ModelProto()

    def __call__(self, X: Any) -> dict[str, np.ndarray]:
        """Return {tensor: values for X} of the tensors `outputs`.

        Raises:
            ValueError: data that an input does not accept.
        """
        fed = self._input_arrays(X)
        rows = len(next(iter(fed.values())))
        predictor = self._predictor_of_row_count(rows)
        if predictor.fixed_rows or not 0 < rows <= MANY_ROWS:
            return predictor.predict(fed, MANY_ROWS)
        try:  # without the checks of `predict`, which take longer than the session for one row
            found = predictor.session.run(self.outputs, fed)
        except Exception:  # onnxruntime raises several types; the file may take one row at a time
            return predictor.predict(fed, MANY_ROWS)
        return dict(zip(self.outputs, found, strict=True))

    def _predictor_of_row_count(self, rows: int) -> Predictor:
        """Return the predictor that runs `rows` rows, whose session has one thread if the rows are
        few.
        """
        effort = work_of_calls(self._work, rows, self.fixed_rows or MANY_ROWS)
        if effort not in self._predictors:
            arguments = self._proto, self.outputs, self._device, self.fixed_rows, effort
            self._predictors[effort] = Predictor(*arguments)
        return self._predictors[effort]

    def _input_arrays(self, X: Any) -> dict[str, np.ndarray]:
        """Return {input: array} of X, which is a dict of arrays, a table, or one array."""
        names = [field.name for field in self.fields]
        columns: Mapping[str, Any] = X
        if not is_input_dict(X):
            if len(names) == 1:
                columns = {names[0]: X}
            elif (in_table := column_names(X)) is None:
                raise ValueError(
                    f"the model has the inputs {names}: pass a table with these columns, or a "
                    "dict with an array for each"
                )
            else:
                groups = Names().columns_by_input(in_table, names)
                columns = {name: X[group[0]] for name, group in groups.items()}
        read = array_with_text_or_nan if self.raw else Field.check
        return {field.name: read(field, columns[field.name]) for field in self.fields}
