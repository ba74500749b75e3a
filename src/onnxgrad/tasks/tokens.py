"""Token classification: named entities, parts of speech."""

from __future__ import annotations

import html
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import onnxgrad as og
from onnxgrad.runtime.predictor import Predictor
from onnxgrad.tasks.base import as_proto, class_probabilities, fine_tuning_rate, input_shapes
from onnxgrad.tasks.text_classes import BATCH, TextClasses

__all__ = ["Tokens"]


class Tokens(TextClasses):
    """Token classification: a label for each word, by scores (rows, tokens, classes).

    `data` are read by `og.language.labeled_texts`: a text of more than `max_length` tokens becomes
    several rows, which overlap, and a text with entities by characters is cut into words with BIO
    labels.

    Args:
        model: a model or a path. One with stored classes, or an output `logits`, gets a new last
            layer unless these are the classes; another one a linear layer on its features.
        data: a CoNLL file, JSON lines, or a list of dicts.
        tokenizer, classes, max_length, stride, label_all: as of `og.language.labeled_texts`; no
            tokenizer: one that lies beside the model.
        at: the features of an encoder, (rows, tokens, features), if it has several such outputs.
        scheme: as for `og.metrics.EntityF1`.
        seed: of a new layer.

    Raises:
        ValueError: files that cannot be read, a label that is no class, entities that overlap, no
            tokenizer, inputs other than `input_ids`, `attention_mask` and `token_type_ids`.
        ImportError: the library tokenizers or seqeval is not installed.

    Examples:
        >>> import onnx, onnxgrad as og
        >>> from tokenizers import Tokenizer, models, pre_tokenizers
        >>> words = Tokenizer(models.WordLevel({"?": 0, "Ann": 1, "sees": 2}, unk_token="?"))
        >>> words.pre_tokenizer = pre_tokenizers.Whitespace()
        >>> encoder = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (int64[N,T] input_ids) => (float[N,T,3] y) <float[3,3] e = {1,0,0,0,1,0,0,0,1}> {
        ...     y = Gather(e, input_ids) }''')
        >>> rows = [{"tokens": ["Ann", "sees", "it"], "tags": ["B-PER", "O", "O"]}] * 8
        >>> task = og.tasks.tokens.Tokens(encoder, rows, words)
        >>> trainer = task.trainer(learning_rate=0.1).fit(task.data, epochs=20)
        >>> [[(e["start"], e["end"], e["label"])] for [e] in task.predict(trainer, ["See Ann"])]
        [[(4, 7, 'PER')]]
    """

    remembered = ("tokenizer", "max_length", "stride", "label_all", "scheme")
    _score_axes = 3

    def __init__(
        self, model: Any, data: Any = None, tokenizer: Any = None, *,
        classes: Sequence[str] | None = None, at: str | None = None, max_length: int | None = None,
        stride: int = 32, label_all: bool = False, scheme: str | None = None, seed: int = 0,
    ) -> None:  # fmt: skip
        self._how = {"max_length": max_length, "stride": stride, "label_all": label_all}
        self._prepare_data_and_model(model, data, tokenizer, classes, at=at, seed=seed)
        self._joins = any(name.startswith("B-") for name in self.classes)
        options = {"axis": 2, "ignore_index": -100, "from_logits": None}
        self.loss = og.losses.LOSSES["cross_entropy"].with_options(options)
        of_entities = [og.metrics.EntityF1(self.classes, scheme)] if self._joins else []
        self.metrics = [*of_entities, "accuracy"]
        self.arguments: dict[str, Any] = {**fine_tuning_rate(self.model)}

    def _read_texts(self, source: Any, classes: Sequence[str] | None, **options: Any) -> Any:
        how = {**self._how, **options}
        return og.language.labeled_texts(source, self._tokenizer, classes, **how)

    def predict(self, model: Any, inputs: Any) -> list[list[dict[str, Any]]]:
        """Return the entities of each text, as dicts of `start`, `end`, `label` and `score`.

        A word has the class of its first token. BIO joins words to entities, whose score is the
        mean of the probabilities; where classes are no BIO, each word is an entity.

        Args:
            model: a trained model, a path, or a `Trainer`.
            inputs: a list of texts or of lists of words, which a space joins; or what `data` is.
        """
        rows = self._read_texts(inputs, self.classes, labels=False)
        rows = rows.for_inputs(input_shapes(self.model))
        predictor, output = Predictor(as_proto(model)), self.model.graph.output[0].name
        batches = (
            class_probabilities(*predictor.run(X, [output]))
            for X, *_ in rows.batches(BATCH, None, 0)
        )
        of_words = rows.of_words(batches)
        return [self._entities_of_text(*pair) for pair in zip(rows.texts, of_words, strict=True)]

    def _entities_of_text(self, text: Any, probabilities: np.ndarray) -> list[dict[str, Any]]:
        """Return the entities of a text, from the class probabilities of its words."""
        found: list[dict[str, Any]] = []
        last = ""  # the label, without B- or I-, of the word before
        for (start, end), row in zip(text.words, probabilities, strict=True):
            name = self.classes[row.argmax()] if row.any() else "O"
            prefix, _, kind = name.partition("-") if self._joins and name != "O" else ("", "", name)
            if prefix in ("I", "E") and kind == last:
                found[-1]["end"] = end
                found[-1]["score"].append(row.max())
            elif name != "O":
                found.append({"start": start, "end": end, "label": kind, "score": [row.max()]})
            last = "" if name == "O" else kind
        return [entity | {"score": float(np.mean(entity["score"]))} for entity in found]

    def describe_results(self, results: Sequence[Sequence[dict]]) -> str:
        """Return the count of texts and the count of entities found, as text."""
        return f"{len(results)} texts, {sum(map(len, results))} entities"

    def write(
        self, inputs: Any, results: Iterable[Sequence[dict]], folder: str | os.PathLike
    ) -> list[Path]:
        """Write `entities.jsonl` and `entities.conll` for training, `entities.html` for reading."""
        files: dict[str, list[str]] = {"jsonl": [], "conll": [], "html": ["<meta charset=utf-8>"]}
        texts = self._read_texts(inputs, self.classes, labels=False).texts
        for text, found in zip(texts, results, strict=True):
            files["jsonl"].append(json.dumps({"text": text.text, "entities": [*found]}))
            for start, end in text.words:
                own = next((e for e in found if e["start"] <= start < e["end"]), None)
                prefix = ("B-" if own and own["start"] == start else "I-") if self._joins else ""
                label = prefix + own["label"] if own else "O"
                files["conll"].append(f"{text.text[start:end]} {label}")
            page, at = "<p>", 0
            for e in found:
                page += html.escape(text.text[at : e["start"]]) + "<mark>"
                page += html.escape(text.text[e["start"] : e["end"]])
                page, at = f"{page} <small>{html.escape(e['label'])}</small></mark>", e["end"]
            files["html"].append(page + html.escape(text.text[at:]) + "</p>")
            files["conll"].append("")
        home = Path(folder)
        home.mkdir(parents=True, exist_ok=True)
        for form, lines in files.items():
            (home / f"entities.{form}").write_text("\n".join([*lines, ""]), encoding="utf-8")
        return [home / f"entities.{form}" for form in files]
