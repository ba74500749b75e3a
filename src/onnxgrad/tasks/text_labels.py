"""Text classification: a class for each text, or for each pair of texts."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrad.language.classified_texts import classified_texts
from onnxgrad.runtime.predictor import Predictor
from onnxgrad.schedules.compose import warmup
from onnxgrad.schedules.curves import linear
from onnxgrad.tasks.base import as_proto, class_probabilities, input_shapes, write_csv
from onnxgrad.tasks.text_classes import BATCH, TextClasses

__all__ = ["TextLabels"]

_RATE, _WARMUP = 5e-5, 0.1  # for pretrained encoders: Devlin et al. 2019, A.3


class TextLabels(TextClasses):
    """Text classification: a class for each text, or for each pair such as premise and hypothesis.

    The rows of `data` have columns of texts and a column of classes. A model with an output
    `logits` (rows, classes) keeps its last layer if it has the classes of the data, and else gets a
    new one by `replace_head`. An encoder gets a linear layer on the pooled features of its tokens
    by `add_head`.

    The metrics are `accuracy` and `f1_macro`. Unless `trainer` gets another, the learning rate
    rises to 5e-5 over a tenth of the training and falls to 0, which suits encoders that were
    trained before, and Adam.

    Args:
        model: a model or a path.
        data: a CSV, TSV, JSON-lines or Parquet file, a list of dicts, a table or a dataset of
            Hugging Face.
        tokenizer: the path of a folder, a `tokenizer.json` or `vocab.txt`, or an object of
            tokenizers or transformers; None: a file that lies beside the model.
        text: the column of the texts, or both columns of pairs, as `("premise", "hypothesis")`.
        label: the column of the classes.
        classes: the names of all classes, in the order of their numbers; None: the classes of the
            model, if all labels of the data are among them, or else these labels, sorted. Labels
            may be whole numbers where classes have names.
        validation: the share of the rows that `validation` holds out, of each class; or other data;
            None: none.
        max_length: tokens of a row, at most; longer ones are cut. None: where the tokenizer cuts,
            or else 512; at most as many as the model takes.
        at: the features of an encoder, (rows, tokens, features) or (rows, features); None:
            `last_hidden_state`, or the only output.
        pool: the features of a text: "mean" of the tokens that `attention_mask` counts, "first"
            token, or "none" where `at` has a row for each text. None: "mean" for features of
            tokens.
        seed: of a new layer, and of the rows that are held out.

    Raises:
        ValueError: a file that cannot be read, a column that is missing, an empty text, a label
            that is missing or no class, no tokenizer, or inputs other than `input_ids`,
            `attention_mask` and `token_type_ids`.
        ImportError: the library tokenizers is not installed.

    Examples:
        >>> import onnx, onnxgrad as og
        >>> from tokenizers import Tokenizer, models, pre_tokenizers
        >>> words = Tokenizer(models.WordLevel({"?": 0, "good": 1, "bad": 2}, unk_token="?"))
        >>> words.pre_tokenizer = pre_tokenizers.Whitespace()
        >>> encoder = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (int64[N,T] input_ids) => (float[N,T,3] y) <float[3,3] e = {1,0,0,0,1,0,0,0,1}> {
        ...     y = Gather(e, input_ids) }''')
        >>> rows = [{"text": "a good film", "label": "yes"}, {"text": "bad", "label": "no"}] * 8
        >>> task = og.tasks.TextLabels(encoder, rows, words)
        >>> trainer = task.trainer(learning_rate=0.1).fit(task.data, epochs=20)
        >>> [found["label"] for found in task.predict(trainer, ["good", "so bad"])]
        ['yes', 'no']
    """

    remembered = ("tokenizer", "text", "label", "max_length")
    _score_axes = 2

    def __init__(
        self, model: Any, data: Any = None, tokenizer: Any = None, *,
        text: str | Sequence[str] = "text", label: str = "label",
        classes: Sequence[str] | None = None, validation: Any = None,
        max_length: int | None = None, at: str | None = None, pool: str | None = None,
        seed: int = 0,
    ) -> None:  # fmt: skip
        if isinstance(classes, str):
            raise ValueError(f"classes={classes!r} is one text: pass the names as a list")
        self._columns: dict[str, Any] = {"max_length": max_length, "text": text, "label": label}
        self._prepare_data_and_model(model, data, tokenizer, classes, at=at, pool=pool, seed=seed)
        self.loss, self.metrics = "cross_entropy", ["accuracy", "f1_macro"]
        self.arguments: dict[str, Any] = {
            "loss_options": {"from_logits": None},
            "learning_rate": warmup(linear(_RATE), _WARMUP),
        }
        if data is not None and validation is not None:
            self.divide_rows(validation, seed)

    def _class_indices_to_stratify(self) -> np.ndarray:
        return np.asarray(self.data.labels)

    def stated(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the given options, with the tokenizer beside the model if none was given."""
        return {"tokenizer": self._tokenizer} | options

    def _read_texts(self, source: Any, classes: Sequence[str] | None, **options: Any) -> Any:
        """Return a reader of texts, or of pairs of texts, with labels."""
        width = (*input_shapes(self.model).get("input_ids", ()), None, None)[1]
        most: Any = self._columns["max_length"] or width
        length = most if width is None else min(most, width)
        how = {**self._columns, "max_length": length, **options}
        return classified_texts(source, self._tokenizer, classes, **how)

    def predict(self, model: Any, inputs: Any) -> list[dict[str, Any]]:
        """Return `label`, `probability` and `probabilities` by class of each text or pair.

        Args:
            model: a trained model, a path, or a `Trainer`.
            inputs: a list of texts, or of pairs of texts; a plain text with one on each line; or
                a source as for `data`, whose labels are not read.
        """
        reader = self._read_texts(inputs, self.classes, labels=False)
        by_length = np.argsort(reader.lengths, kind="stable")
        reader = reader.subset(by_length).for_inputs(input_shapes(self.model))
        name = self.model.graph.output[0].name
        predictor = Predictor(as_proto(model), [name])
        size = predictor.fixed_rows or BATCH
        batches = (predictor.run_rows(X)[name] for X, *_ in reader.batches(size, None, 0))
        rows = (row for scores in batches for row in class_probabilities(scores))
        order = by_length if reader.order is None else by_length[reader.order]
        found: list[dict[str, Any]] = [{}] * len(order)
        for number, shares in zip(order, rows, strict=True):
            own = dict(zip(self.classes, map(float, shares), strict=True))
            label = max(own, key=own.__getitem__)
            found[number] = {"label": label, "probability": own[label], "probabilities": own}
        return found

    def write(
        self, inputs: Any, results: Iterable[dict[str, Any]], folder: str | os.PathLike
    ) -> list[Path]:
        """Write `labels.csv`: texts, labels, and the probability of each class.

        `read` takes the file, and `data` may be it.
        """
        texts = self._read_texts(inputs, self.classes, labels=False).texts
        text, label = self._columns["text"], self._columns["label"]
        columns = [text] if isinstance(text, str) else [*text]
        header = [*columns, label, *(f"probability_{name}" for name in self.classes)]
        rows = (
            [*own, found["label"], *(f"{found['probabilities'][n]:.6f}" for n in self.classes)]
            for own, found in zip(texts, results, strict=True)
        )
        return [write_csv(Path(folder) / "labels.csv", header, rows)]
