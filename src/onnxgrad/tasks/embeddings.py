"""Embeddings: metric learning by classes, and search by texts that belong together."""

from __future__ import annotations

import csv
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

import onnxgrad as og
from onnxgrad.tasks.base import Task
from onnxgrad.tasks.text_rows import INPUTS, Encoding, TextRows, columns_of, read_rows

__all__ = ["Embeddings"]

_POOLS: dict[int, str | None] = {2: None, 3: "mean", 4: "image"}  # by the number of axes
_FLOATS = (1, 10, 11, 16)  # codes of dtypes
_MARGINS = ("arcface", "cosface")
# by the kind of the data: the loss, and metrics
_DEFAULTS: dict[str, tuple[str, list[str]]] = {
    "pairs": ("multiple_negatives", ["query_recall_at_1", "query_recall_at_10"]),
    "scores": ("cosine_similarity", ["cosine_spearman"]),
    "classes": ("contrastive", ["hit_rate_at_1", "hit_rate_at_5"]),
}
_BATCH, _CHUNK, _NEIGHBORS = 64, 1024, 5


class Embeddings(Task):
    """Embeddings: rows that belong together shall be near, by the cosine of their embeddings.

    All texts of a row go through one model: they are consecutive rows of what it gets, while
    `batch_size` counts rows of the file. Anchor and positive have one label, which they share with
    rows of the same anchor; each negative has a label of its own. With scores, these are the
    labels of both. The other rows of a batch are negatives, too: a positive should not fit the
    anchors of other rows.

    The file that comes out has the nodes of `model`; behind them a pool, a projection or the
    centers of classes where these are added. `encoder` removes the centers.

    Args:
        model: a model or its path. Its embeddings are an output (N, D), or else one of tokens
            (N, T, D) or of maps (N, D, H, W), which is pooled.
        data: a `.csv`, `.tsv` or `.jsonl` file of texts, with the columns `anchor` and `positive`,
            and after these `negative`, `negative_2`..., or `score`; a folder of images with a
            sub-folder for each class; or a pair (X, labels) of arrays.
        loss: a name. None: "multiple_negatives" for texts, "cosine_similarity" for texts with
            scores, "contrastive" for classes. "arcface" and "cosface" add centers of classes.
        loss_options: of the loss, as `{"mining": "semi-hard"}`.
        output: name of the embeddings; None: the only float output of two axes, or of more.
        pool: "mean", "first" or "image", see `og.add_head`; None: "mean" for tokens, without those
            that `attention_mask` leaves out, "image" for maps.
        projection: units of a new linear layer on the embeddings; None: no layer.
        tokenizer: path of a `tokenizer.json` or `vocab.txt`, or a `tokenizers.Tokenizer`; None: one
            that lies beside the model.
        length: tokens of a text; longer ones are cut.
        images: `{"size": 224, "transforms": [...]}`, as for `og.image_folder`.
        classes, rows: P and K of `og.p_by_k`, which makes batches of images and arrays.
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

    def __init__(
        self, model: Any, data: Any = None, *, loss: str | None = None,
        loss_options: Mapping[str, Any] | None = None, output: str | None = None,
        pool: str | None = None, projection: int | None = None, tokenizer: Any = None,
        length: int = 128, images: Mapping[str, Any] | None = None, classes: int = 8, rows: int = 4,
        seed: int = 0,
    ) -> None:  # fmt: skip
        home = None if isinstance(model, onnx.ModelProto) else Path(model).parent
        self.model = model if home is None else onnx.load(model)
        self._of_texts = tokenizer, home, length
        self._images = {"size": 224, **(images or {})}
        self._texts: Encoding | None = None
        self._add_layers(output, pool, projection, seed)
        self._kind = "classes"
        if data is not None:
            self._kind, rows_of_data = self._rows(data)
            if self._kind == "classes":
                X, labels = rows_of_data if isinstance(data, tuple) else (rows_of_data, None)
                self.data = og.p_by_k(X, labels, classes, rows)
            else:
                self.data = rows_of_data
        default, self.metrics = _DEFAULTS[self._kind]
        name = loss or default
        if (name == "cosine_similarity") != (self._kind == "scores"):
            raise ValueError(
                f"loss={name!r}: scores of pairs need 'cosine_similarity', and only they"
            )
        if name in _MARGINS:
            if self._kind != "classes" or self.data is None:
                raise ValueError(f"loss={name!r} needs data with classes, for their centers")
            reader: Any = self.data
            count = int(reader.labels.max()) + 1
            self.classes = getattr(reader.data, "classes", [str(c) for c in range(count)])
            self.model = og.add_head(
                self.model, len(self.classes), self.output, "centers", cosine=True, seed=seed
            )
            self.metrics = ["accuracy"]
        several = len(_float_outputs(self.model)) > 1
        self.loss = {self.output: name} if several else name
        options = dict(loss_options or {})
        self.arguments = {"loss_options": {self.output: options} if several else options}

    def _add_layers(
        self, output: str | None, pool: str | None, projection: int | None, seed: int
    ) -> None:
        """Choose the output of embeddings, and add a pool and a projection."""
        axes = _float_outputs(self.model)
        if output is None:
            found = [n for n, count in axes.items() if count == 2] or [*axes]
            if len(found) != 1:
                raise ValueError(f"embeddings may be {found}: name one by output=")
            output = found[0]
        elif output not in axes:
            raise ValueError(f"output={output!r} is no float output: there are {[*axes]}")
        pool = pool or _POOLS.get(axes[output])
        if pool is not None or projection is not None:
            inputs = {x.name for x in self.model.graph.input}
            mask = INPUTS[1] if pool == "mean" and INPUTS[1] in inputs else None
            self.model = og.add_head(
                self.model, projection, output, "projection", pool=pool, mask=mask, seed=seed
            )
            output = self.model.graph.output[0].name
        self.output = output

    def _rows(self, data: Any) -> tuple[str, Any]:
        """Return the kind of data, a key of `_DEFAULTS`, and their reader; arrays as they are."""
        if isinstance(data, tuple):
            return "classes", data
        path = Path(data)
        if path.is_dir():
            return "classes", og.image_folder(path, **self._images)
        rows = read_rows(path)
        names, scored = columns_of(path, rows)
        texts = [row[name] for row in rows for name in names]
        if scored:
            scores = np.array([row["score"] for row in rows], np.float32)
            return "scores", TextRows(self._encoding(), texts, scores.repeat(2), 2)
        numbers: dict[str, int] = {}
        labels = np.arange(len(texts)).reshape(len(rows), -1) + len(rows)  # each of its own
        labels[:, :2] = [[numbers.setdefault(row["anchor"], len(numbers))] for row in rows]
        return "pairs", TextRows(self._encoding(), texts, labels.ravel(), len(names))

    def _encoding(self) -> Encoding:
        if self._texts is None:
            self._texts = Encoding(self.model, *self._of_texts)
        return self._texts

    def read(self, path: Any) -> Any:
        """Return other rows, from what `data` may be, to evaluate on; arrays as they are.

        Raises:
            ValueError: as for `data`; rows of another kind; or other classes than the centers are
                of.
        """
        kind, reader = self._rows(path)
        if self.data is not None and kind != self._kind:
            raise ValueError(f"these are rows of {kind}, and those to train on of {self._kind}")
        classes = getattr(reader, "classes", None)
        if self.classes and classes is not None and classes != self.classes:
            raise ValueError(f"{str(path)!r} has the classes {classes}, not {self.classes}")
        return reader

    def encoder(self, model: Any) -> onnx.ModelProto:
        """Return a trained model as it is used: without the centers of classes, if it has some.

        Args:
            model: a trained model, a path, or a `Trainer`.
        """
        proto = model.model if hasattr(model, "partial_fit") else model
        proto = proto if isinstance(proto, onnx.ModelProto) else onnx.load(proto)
        if self.output in [y.name for y in proto.graph.output]:
            return proto
        return og.features(proto, at=self.output)

    def predict(self, model: Any, inputs: Any) -> Any:
        """Return the embeddings of length 1, (N, D).

        Args:
            model: a trained model, a path, or a `Trainer`.
            inputs: a list of texts; a `.txt` file with a text on each line; a folder of images with
                a sub-folder for each class; a reader; an array, or a dict of arrays.
        """
        if isinstance(inputs, (str, os.PathLike)):
            path = Path(inputs)
            if path.is_dir():
                inputs = og.image_folder(path, **self._images)
            else:
                inputs = path.read_text(encoding="utf-8").splitlines()
        if isinstance(inputs, (list, tuple)) and all(isinstance(text, str) for text in inputs):
            inputs = TextRows(self._encoding(), inputs, None, 1)
        with tempfile.TemporaryDirectory() as folder:
            og.save(self.encoder(model), path := Path(folder, "model.onnx"))
            session = onnxruntime.InferenceSession(path)
            feeds = _feeds(session, inputs)
            z = np.concatenate([session.run([self.output], feed)[0] for feed in feeds])
        return z / np.maximum(np.linalg.norm(z, axis=1, keepdims=True), 1e-12)

    def write(self, inputs: Any, results: Iterable[Any], folder: str | os.PathLike) -> list[Path]:
        """Write `embeddings.npy`, and `neighbors.csv` with the five nearest others of each row.

        Rows of the table are number, id, rank, the number and id of the neighbor, and the cosine;
        ids are texts, paths of images, or else numbers.
        """
        z = np.asarray(results)
        names = getattr(inputs, "files", inputs)
        if isinstance(names, (str, os.PathLike)):
            path = Path(names)
            is_folder = path.is_dir()
            names = (
                og.image_folder(path, **self._images).files
                if is_folder
                else path.read_text(encoding="utf-8").splitlines()
            )
        if not isinstance(names, (list, tuple)) or len(names) != len(z):
            names = range(len(z))
        home = Path(folder)
        home.mkdir(parents=True, exist_ok=True)
        np.save(home / "embeddings.npy", z)
        with (home / "neighbors.csv").open("w", encoding="utf-8", newline="") as file:
            table = csv.writer(file)
            table.writerow(["number", "id", "rank", "neighbor", "neighbor_id", "cosine"])
            for start in range(0, len(z), _CHUNK):
                cosines = z[start : start + _CHUNK] @ z.T
                for i, row in enumerate(cosines, start):
                    row[i] = -np.inf
                    best = np.argsort(-row, kind="stable")[: min(_NEIGHBORS, len(z) - 1)]
                    for rank, j in enumerate(best.tolist(), 1):
                        table.writerow([i, names[i], rank, j, names[j], f"{row[j]:.6f}"])
        return [home / "embeddings.npy", home / "neighbors.csv"]


def _feeds(session: Any, inputs: Any) -> Iterator[dict[str, np.ndarray]]:
    """Yield what a session takes, batch by batch, from a reader or arrays."""
    declared = {x.name: x for x in session.get_inputs()}
    if isinstance(inputs, og.Reader):
        shapes = {name: tuple(x.shape) for name, x in declared.items()}
        batches = (b[0] for b in inputs.for_inputs(shapes).batches(_BATCH, None, 0))
    else:
        columns = inputs if isinstance(inputs, Mapping) else {next(iter(declared)): inputs}
        columns = {name: np.asarray(column) for name, column in columns.items()}
        count = len(next(iter(columns.values())))
        starts = range(0, count, _BATCH)
        batches = ({n: a[s : s + _BATCH] for n, a in columns.items()} for s in starts)
    for batch in batches:
        yield dict(batch) if isinstance(batch, Mapping) else {next(iter(declared)): batch}


def _float_outputs(model: onnx.ModelProto) -> dict[str, int]:
    """Return the number of axes of each float output."""
    found = {y.name: y.type.tensor_type for y in model.graph.output}
    return {n: len(t.shape.dim) for n, t in found.items() if t.elem_type in _FLOATS}
