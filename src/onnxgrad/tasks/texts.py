"""`Texts`: the task of language models, to continue texts."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable
from dataclasses import KW_ONLY
from pathlib import Path
from typing import Any

from onnxgrad.data.arrays import DataError
from onnxgrad.data.columns import Names
from onnxgrad.errors import argument, named
from onnxgrad.language.folders import ModelFolder, is_folder, load_folder
from onnxgrad.language.generation import generate
from onnxgrad.language.text_readers import Texts as TextRows, texts
from onnxgrad.tasks.base import with_fields
from onnxgrad.tasks.rows_task import RowsTask
from onnxgrad.training.data import Dataset

__all__ = ["Texts"]


@with_fields
class Texts(RowsTask):
    """Language modeling: training to predict each token of texts, and continuation of prompts.

    `data` are records in JSON lines, Parquet or plain text, as `og.language.texts` reads them.
    `predict` goes on with prompts. A fifth of the texts is held out for `validation`, unless it is
    said otherwise.

    Args:
        model: the folder of a language model, or its file in such a folder; or a model, with
            `tokenizer`.
        data: the texts to train on; None: to go on with prompts.
        tokenizer: as of `og.language.texts`; None: the tokenizer of the folder.
        max_length, completion_only, packing: as of `og.language.texts`.
        loss: as of `Trainer`. None: `causal_lm`, or the output `loss_output` of the model.
        loss_options, loss_weights: as of `Trainer`.
        loss_output: the output of the model that is its loss.
        metrics: as of `Trainer`; None: perplexity.
        validation: the share of the texts to hold out, or other data; 0: none.
        seed: of the texts that are held out.

    Attributes:
        data: a reader of tokens, as `Trainer.fit` takes it.
        validation: the same, of the texts that are held out; None without.

    Raises:
        ValueError: no text, a file that cannot be read, or no tokenizer.
        ImportError: the library `tokenizers` is not installed.

    Examples:
        >>> import onnx, onnxgrad as og
        >>> from tokenizers import Tokenizer, models
        >>> words = Tokenizer(models.WordLevel({"tick": 0, "tock": 1}, unk_token="tick"))
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (int64[N,T] input_ids) => (float[N,T,2] logits) <float[2,2] w = {0.0, 1, 1, 0}>
        ...     { logits = Gather(w, input_ids) }''')
        >>> task = og.tasks.Texts(model, tokenizer=words)
        >>> task.predict(model, ["tick"])[0][:9]
        'tock tick'
    """

    _: KW_ONLY
    tokenizer: Any = None
    max_length: int | None = None
    completion_only: bool | None = None
    packing: bool = False

    def __post_init__(self) -> None:
        is_file = isinstance(self.model, (str, os.PathLike)) and not Path(self.model).is_dir()
        reads_folder = self.tokenizer is None or not is_file
        folder = language_folder(self.model) if reads_folder else None
        self._tokenizer = folder if self.tokenizer is None else self.tokenizer
        self.model = self.model if folder is None else folder.model
        super().__post_init__()

    def _open_rows(self, data: Any) -> Any:
        """Return the reader of texts for a language model."""
        if self._tokenizer is None:
            raise DataError(
                f"{data!r} holds texts: {named('model')} must be the folder of a language model, "
                f"or {argument('tokenizer')} name the folder of its tokenizer"
            )
        with warnings.catch_warnings():
            # `_rows_for_model` adds the reader's warnings to the notes
            warnings.simplefilter("ignore")
            return texts(
                data,
                self._tokenizer,
                self.max_length,
                completion_only=self.completion_only,
                packing=self.packing,
            )

    def _decide_loss(self, source: Any) -> None:
        self._set_default_loss("causal_lm", "each token follows from the ones before")

    def _rows_for_model(self, source: Any) -> tuple[Dataset, Names]:
        self._training_objective()
        if isinstance(source, TextRows):  # the number of texts in a stream is unknown
            tokens = f"{source.tokens} tokens, of which {source.learned} are learned"
            self.notes += [f"{source.rows} texts of {tokens}", *source.notes]
        return Dataset(source), self.names.copy()

    def _default_metrics(self) -> list[str]:
        return ["perplexity"]

    def predict(self, model: Any, inputs: Any, max_new_tokens: int = 64) -> list[str]:
        """Return the continuation of each prompt, by the most probable tokens.

        Args:
            model: a trained model, the path of its file or folder, or a `Trainer`.
            inputs: a prompt or a list of prompts, as of `og.language.generate`.
            max_new_tokens: tokens of each result, at most.
        """
        prompts = [inputs] if isinstance(inputs, str) else list(inputs)
        return list(generate(model, prompts, max_new_tokens, tokenizer=self._tokenizer))

    def write(self, inputs: Any, results: Iterable[str], folder: str | os.PathLike) -> list[Path]:
        """Write `texts.jsonl`, a prompt and its completion in each line.

        Args:
            inputs: as of `predict`.
            results: what `predict` returned for them.
            folder: is created; a file in it of that name is replaced.
        """
        prompts = [inputs] if isinstance(inputs, str) else list(inputs)
        path = Path(folder, "texts.jsonl")
        path.parent.mkdir(parents=True, exist_ok=True)
        records = zip(prompts, results, strict=True)
        lines = [json.dumps({"prompt": p, "completion": text}) for p, text in records]
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return [path]


def language_folder(model: Any) -> ModelFolder | None:
    """Return the language-model folder at a path, or around a model file; None for other models."""
    if isinstance(model, ModelFolder):
        return model
    if not isinstance(model, (str, os.PathLike)):
        return None
    path = Path(model)
    if path.is_dir():
        return load_folder(path)
    return load_folder(path.parent, path.name) if is_folder(path.parent) else None
