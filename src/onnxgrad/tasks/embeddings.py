"""Embeddings: metric learning by classes, and search by texts that belong together."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import onnxgrad as og
from onnxgrad.runtime.predictor import Predictor
from onnxgrad.tasks.base import (
    CLASSES,
    Task,
    as_proto,
    find_tokenizer,
    fine_tuning_rate,
    folder_of_model,
    input_shapes,
    with_classes,
    with_metadata,
    write_csv,
)

__all__ = ["Embeddings"]

# {count of axes of an output: pooling}
_POOLS: dict[int, str | None] = {2: None, 3: "mean", 4: "image"}
_FLOATS = (1, 10, 11, 16)  # codes of float dtypes in TensorProto
_MARGINS = ("arcface", "cosface")
# {kind of rows: (default loss, default metrics)}
_DEFAULTS: dict[str, tuple[str, list[str]]] = {
    "pairs": ("multiple_negatives", ["query_recall_at_1", "query_recall_at_10"]),
    "scores": ("cosine_similarity", ["cosine_spearman"]),
    "classes": ("contrastive", ["hit_rate_at_1", "hit_rate_at_5"]),
}
_BATCH, _CHUNK, _NEIGHBORS = 64, 1024, 5


class Embeddings(Task):
    """Embeddings: training and prediction of vectors, near for rows that belong together.

    `data` are texts, as `og.language.paired_texts` reads them: the other rows of a batch are
    negatives, so that a positive should not fit their anchors. Or images or arrays of classes.

    The file that comes out has the nodes of `model`; behind them a pool, a projection or the
    centers of classes where these are added. `finished` removes the centers.

    Args:
        model: a model or its path. Its embeddings are an output (N, D), or else one of tokens
            (N, T, D) or of maps (N, D, H, W), which is pooled.
        data: a file of pairs of texts, with negatives or a score; a folder of images with a
            sub-folder for each class; or a pair (X, labels) of arrays.
        loss: a name. None: "multiple_negatives" for texts, "cosine_similarity" for texts with
            scores, "contrastive" for classes. "arcface" and "cosface" add centers of classes.
        loss_options: of the loss, as `{"mining": "semi-hard"}`.
        output: name of the embeddings; None: the only float output of two axes, or of more.
        pool: "mean", "first" or "image", see `og.add_head`; None: "mean" for tokens, without those
            that `attention_mask` leaves out, "image" for maps.
        projection: units of a new linear layer on the embeddings; None: no layer.
        tokenizer: as of `og.language.paired_texts`; None: one that lies beside the model.
        length: tokens of a text; longer ones are cut.
        images: `{"size": 224, "transforms": [...]}`, as for `og.data.image_folder`.
        classes, rows: P and K of `og.data.p_by_k`, which makes batches of images and arrays.
        seed: of new layers.

    Raises:
        ValueError: a file that cannot be read, no output of embeddings or several, no tokenizer, or
            a loss that does not fit the data.
        ImportError: the library tokenizers or Pillow is not installed.

    Examples:
        >>> import numpy as np, onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,2] x) => (float[N,2] y) <float[2,2] w = {1, 0, 0, 1}> {
        ...     y = MatMul(x, w) }''')
        >>> X, labels = np.float32([[1, 3], [1, -3], [-1, 3], [-1, -3]]), [0, 0, 1, 1]
        >>> task = og.tasks.embeddings.Embeddings(model, (X, labels), classes=2, rows=2)
        >>> trainer = task.trainer(optimizer="adam", learning_rate=0.1)
        >>> before = trainer.evaluate(task.data)["hit_rate_at_1"]
        >>> before, trainer.fit(task.data, epochs=30).evaluate(task.data)["hit_rate_at_1"]
        (0.0, 1.0)
        >>> task.predict(trainer, X).shape
        (4, 2)
    """

    remembered = ("output", "tokenizer", "length", "images")

    def __init__(
        self, model: Any, data: Any = None, *, loss: str | None = None,
        loss_options: Mapping[str, Any] | None = None, output: str | None = None,
        pool: str | None = None, projection: int | None = None, tokenizer: Any = None,
        length: int = 128, images: Mapping[str, Any] | None = None, classes: int = 8, rows: int = 4,
        seed: int = 0,
    ) -> None:  # fmt: skip
        self.model = as_proto(model)
        self._of_texts = tokenizer, folder_of_model(model), length
        self._images = {"size": 224, **(images or {})}
        self._add_pooling_and_projection(output, pool, projection, seed)
        self._kind = "classes"
        if data is not None:
            self._kind, rows_of_data = self._read_rows(data)
            if self._kind == "classes":
                X, labels = rows_of_data if isinstance(data, tuple) else (rows_of_data, None)
                self.data = og.data.p_by_k(X, labels, classes, rows)
            else:
                self.data = rows_of_data
        default, self.metrics = _DEFAULTS[self._kind]
        name = loss or default
        if (name == "cosine_similarity") != (self._kind == "scores"):
            raise ValueError(
                f"loss={name!r} does not fit rows of {self._kind}: pass loss='cosine_similarity' "
                "for pairs with scores, and another loss= for other data"
            )
        if name in _MARGINS:
            if self._kind != "classes" or self.data is None:
                raise ValueError(
                    f"loss={name!r} learns a center for each class: pass data with classes"
                )
            reader: Any = self.data
            count = int(reader.labels.max()) + 1
            self.classes = getattr(reader.data, "classes", [str(c) for c in range(count)])
            self.model = og.add_head(
                self.model, len(self.classes), self.output, "centers", cosine=True, seed=seed
            )
            self.model = with_classes(self.model, self.classes)
            self.metrics = ["accuracy"]
        several = len(_float_output_ranks(self.model)) > 1
        self.loss = {self.output: name} if several else name
        options = dict(loss_options or {})
        self.arguments = {"loss_options": {self.output: options} if several else options}
        if name not in _MARGINS:  # the new centers need the learning rate of the optimizer
            self.arguments |= fine_tuning_rate(self.model)

    def stated(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the given options, with the name of the output that holds the embeddings."""
        return options | ({"output": self.output} if "output" in options else {})

    def _add_pooling_and_projection(
        self, output: str | None, pool: str | None, projection: int | None, seed: int
    ) -> None:
        """Set `output`, after adding a pooling and a projection layer to the model where needed."""
        axes = _float_output_ranks(self.model)
        if output is None:
            found = [n for n, count in axes.items() if count == 2] or [*axes]
            if len(found) != 1:
                raise ValueError(
                    f"the embeddings may be any of the outputs {found}: name one with output="
                )
            output = found[0]
        elif output not in axes:
            raise ValueError(f"output={output!r} must be a float output, one of {[*axes]}")
        pool = pool or _POOLS.get(axes[output])
        if pool is not None or projection is not None:
            inputs = {x.name for x in self.model.graph.input}
            mask = "attention_mask" if pool == "mean" and "attention_mask" in inputs else None
            self.model = og.add_head(
                self.model, projection, output, "projection", pool=pool, mask=mask, seed=seed
            )
            output = self.model.graph.output[0].name
        self.output = output

    def _read_rows(self, data: Any) -> tuple[str, Any]:
        """Return the kind of rows ("pairs", "scores" or "classes"), and their reader or arrays."""
        if isinstance(data, tuple):
            return "classes", data
        if Path(data).is_dir():
            return "classes", og.data.image_folder(data, **self._images)
        reader = self._read_texts(data)
        return reader.kind, reader

    def _read_texts(self, source: Any) -> Any:
        """Return a reader of texts for the inputs of the model."""
        shapes = input_shapes(self.model)
        if "input_ids" not in shapes:
            raise ValueError(f"texts are for models with inputs such as input_ids, not {[*shapes]}")
        tokenizer, home, length = self._of_texts
        most = (*shapes["input_ids"], None, None)[1] or length
        self._tokenizer = find_tokenizer(tokenizer, home)
        reader = og.language.paired_texts(source, self._tokenizer, most)
        return reader.for_inputs(shapes)

    def evaluate(
        self, data: Any, *, batch_size: int | None = None, device: str = "cpu"
    ) -> dict[str, Any]:
        """Return the loss and the metrics of the model for the rows of files or arrays.

        Of a task without data, these decide the loss: of pairs, of scores, or of classes.

        Args:
            data: as of the task.
            batch_size: rows of one call of the runtime.
            device: "cpu", "cuda" or "cuda:1".
        """
        own = self
        if self.data is None:
            tokenizer, home, length = self._of_texts
            source = tokenizer if tokenizer is not None or home is None else str(home)
            own = type(self)(self.model, data, tokenizer=source, length=length)
            if self.metrics != _DEFAULTS[self._kind][1]:  # the user has set metrics
                own.metrics = self.metrics
        results = super(Embeddings, own).evaluate(data, batch_size=batch_size, device=device)
        self.rows = own.rows
        return results

    def read(self, path: Any) -> Any:
        """Return further rows to evaluate on: a reader of files, or the given arrays.

        Raises:
            ValueError: as for `data`; rows of another kind; or other classes than the centers are
                of.
        """
        kind, reader = self._read_rows(path)
        if self.data is not None and kind != self._kind:
            raise ValueError(
                f"rows to evaluate on must be {self._kind}, as the rows to train on, not {kind}"
            )
        classes = getattr(reader, "classes", None)
        if self.classes and classes is not None and classes != self.classes:
            raise ValueError(
                f"{str(path)!r} has the classes {classes}, and the model {self.classes}: pass rows "
                "with the classes of the model"
            )
        return reader

    def finished(self, model: Any) -> onnx.ModelProto:
        """Return a trained model for deployment, without the class centers of the loss.

        Args:
            model: a trained model, a path, or a `Trainer`.
        """
        proto = as_proto(model)
        if self.output in [y.name for y in proto.graph.output]:
            return proto
        return with_metadata(og.graph.features(proto, at=self.output), {CLASSES: None})

    def _open_inputs(self, inputs: Any) -> Any:
        """Return a reader of a folder's images, a file's lines, or inputs in memory unchanged."""
        if not isinstance(inputs, (str, os.PathLike)):
            return inputs
        if Path(inputs).is_dir():
            return og.data.image_folder(inputs, **self._images)
        return Path(inputs).read_text(encoding="utf-8").splitlines()

    def predict(self, model: Any, inputs: Any) -> Any:
        """Return the embeddings of the inputs, (N, D), each of length 1.

        Args:
            model: a trained model, a path, or a `Trainer`.
            inputs: a list of texts; a `.txt` file with a text on each line; a folder of images with
                a sub-folder for each class; a reader; an array, or a dict of arrays.
        """
        inputs = self._open_inputs(inputs)
        if isinstance(inputs, (list, tuple)) and all(isinstance(text, str) for text in inputs):
            inputs = self._read_texts(inputs)
        predictor = Predictor(self.finished(model), [self.output])
        feeds = _input_batches(predictor, inputs)
        z = np.concatenate([predictor.predict(feed, _BATCH)[self.output] for feed in feeds])
        return z / np.maximum(np.linalg.norm(z, axis=1, keepdims=True), 1e-12)

    def write(self, inputs: Any, results: Iterable[Any], folder: str | os.PathLike) -> list[Path]:
        """Write `embeddings.npy`, and `neighbors.csv` with the five nearest rows of each row.

        Rows of the table are number, id, rank, the number and id of the neighbor, and the cosine;
        ids are texts, paths of images, or else numbers.
        """
        z = np.asarray(results)
        names = self._open_inputs(inputs)
        names = getattr(names, "files", names)
        if not isinstance(names, (list, tuple)) or len(names) != len(z):
            names = range(len(z))
        header = ["number", "id", "rank", "neighbor", "neighbor_id", "cosine"]
        file = write_csv(Path(folder) / "neighbors.csv", header, _nearest_neighbor_table(z, names))
        np.save(file.with_name("embeddings.npy"), z)
        return [file.with_name("embeddings.npy"), file]


def _nearest_neighbor_table(z: np.ndarray, names: Sequence[Any]) -> Iterator[list[Any]]:
    """Yield CSV cells for each row of embeddings and its nearest other rows, nearest first."""
    for start in range(0, len(z), _CHUNK):
        cosines = z[start : start + _CHUNK] @ z.T
        for i, row in enumerate(cosines, start):
            row[i] = -np.inf
            best = np.argsort(-row, kind="stable")[: min(_NEIGHBORS, len(z) - 1)]
            for rank, j in enumerate(best.tolist(), 1):
                yield [i, names[i], rank, j, names[j], f"{row[j]:.6f}"]


def _input_batches(predictor: Predictor, inputs: Any) -> Iterator[Any]:
    """Yield `{input: array}` for each batch of a reader, or once for arrays."""
    batches: Iterable[Any] = [inputs]
    if isinstance(inputs, og.data.Reader):
        reader = inputs.for_inputs({name: tuple(x.shape) for name, x in predictor.inputs.items()})
        batches = (batch[0] for batch in reader.batches(_BATCH, None, 0))
    for X in batches:
        columns = X if isinstance(X, Mapping) else {next(iter(predictor.inputs)): X}
        yield {name: np.asarray(column) for name, column in columns.items()}


def _float_output_ranks(model: onnx.ModelProto) -> dict[str, int]:
    """Return `{name: count of axes}` of a model's float outputs."""
    found = {y.name: y.type.tensor_type for y in model.graph.output}
    return {n: len(t.shape.dim) for n, t in found.items() if t.elem_type in _FLOATS}
