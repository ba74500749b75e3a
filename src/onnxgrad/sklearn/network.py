"""A model in training: its trainer, and a session that predicts; pickled without sessions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from onnx import ModelProto

from onnxgrad.data.columns import is_table
from onnxgrad.data.fields import Field
from onnxgrad.graph.inference.infer import infer
from onnxgrad.graph.shapes import dims
from onnxgrad.model.convert import to_ir
from onnxgrad.model.surgery import select_model_inputs_outputs
from onnxgrad.runtime.device import Device
from onnxgrad.runtime.session import session, work
from onnxgrad.sklearn.front import Front, raw_fed
from onnxgrad.sklearn.head import Head
from onnxgrad.training.callbacks.events import Callbacks
from onnxgrad.training.trainer import Trainer

_ROWS = 1024  # of a call of the runtime


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
        self._encoder: Predictor | None = None
        self._predictor: Predictor | None = None

    def _encoded(self, X: Any) -> Any:
        """Return what the frozen part in front computes from X; without one, X."""
        if self.front is None:
            return X
        if self._encoder is None:
            device = self.arguments["device"]
            self._encoder = Predictor(self.front.part, self.front.cuts, device, raw=True)
        return self._encoder(X)

    def train(self, further: bool, data: Sequence[Any], callbacks: Any, **options: Any) -> None:
        """Train on (X, y, sample_weight): `fit` of the trainer, or `partial_fit` with `further`."""
        X, y, weight = data
        trainer = self.trainer
        trainer.callbacks = Callbacks(callbacks)
        self._predictor = None
        train = trainer.partial_fit if further else trainer.fit
        train(self._encoded(X), y, sample_weight=weight, **options)
        infos = () if trainer.setup is None else trainer.setup.labels.values()
        self.from_logits = next((info.from_logits for info in infos), None)

    @property
    def model(self) -> ModelProto:
        """The trained model."""
        model = self.trainer.model
        return self.front.merged(model) if self.front else model

    def run(self, X: Any) -> dict[str, np.ndarray]:
        """Return the target, and the labels if the model has an output of them."""
        if self._predictor is None:
            outputs = dict.fromkeys([self.head.target, self.head.label or self.head.target])
            raw = self.front is not None
            self._predictor = Predictor(self.model, list(outputs), self.arguments["device"], raw)
        return self._predictor(X)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_predictor": None, "_encoder": None}


class Predictor:
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
        self.raw = raw
        proto = select_model_inputs_outputs(proto, outputs)
        model = to_ir(proto)
        infer(model)
        inputs = {str(x.name): (x.dtype, dims(x)) for x in model.graph.inputs}
        self.fields = [Field(n, d.numpy(), shape) for n, (d, shape) in inputs.items() if d]
        first = [shape[0] for _, shape in inputs.values() if shape]
        self.fixed = next((d for d in first if isinstance(d, int) and d > 0), None)
        self.outputs = list(outputs)
        self.session = session(proto, Device.of(device), work(model.graph) * (self.fixed or _ROWS))

    def __call__(self, X: Any) -> dict[str, np.ndarray]:
        """Return the tensors, by name.

        Raises:
            ValueError: data that an input does not accept.
        """
        fed = self._fed(X)
        rows, size = len(next(iter(fed.values()))), self.fixed or _ROWS
        parts = []
        for start in range(0, rows, size):
            part = {name: array[start : start + size] for name, array in fed.items()}
            count = min(size, rows - start)
            if self.fixed:  # the rows that are missing are copies of the first
                part = {n: np.resize(a, (size, *a.shape[1:])) for n, a in part.items()}
            parts.append([y[:count] for y in self.session.run(self.outputs, part)])
        columns = zip(self.outputs, zip(*parts, strict=True), strict=True)
        return {name: np.concatenate(arrays) for name, arrays in columns}

    def _fed(self, X: Any) -> dict[str, np.ndarray]:
        if self.raw:
            return raw_fed(self.fields, X)
        if len(self.fields) == 1 and not isinstance(X, Mapping):
            (field,) = self.fields
            return {field.name: field.check(X)}
        if not isinstance(X, Mapping) and not is_table(X):
            names = [field.name for field in self.fields]
            raise ValueError(f"the model has the inputs {names}: pass a table of these columns")
        return {field.name: field.check(X[field.name]) for field in self.fields}
