"""Rows of texts that belong together, as tokens for one encoder."""

from __future__ import annotations

import copy
import csv
import json
import math
import warnings
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir

import onnxgrad as og

INPUTS = ("input_ids", "attention_mask", "token_type_ids")
_TOKENIZERS = ("tokenizer.json", "vocab.txt")
_PADS = ("[PAD]", "<pad>", "</s>", "<|endoftext|>")


class TextRows(og.IndexedReader):
    """Rows of `each` texts, which are consecutive rows of what the model gets."""

    pads = True

    def __init__(self, encoding: Encoding, texts: Sequence[str], labels: Any, each: int) -> None:
        if not texts:
            raise ValueError("there is no text")
        self.rows, self.each, self._encoding = len(texts) // each, each, encoding
        self.labels = None if labels is None else np.asarray(labels)
        self._tokens = encoding.tokens(texts)

    def _every(self, numbers: np.ndarray) -> np.ndarray:
        return (np.asarray(numbers)[:, None] * self.each + np.arange(self.each)).ravel()

    def take(self, indices: np.ndarray, seed: int | None) -> Any:
        """Return the texts and labels of rows."""
        every = self._every(indices)
        X = self._encoding.batch([self._tokens[i] for i in every])
        return (X,) if self.labels is None else (X, self.labels[every])

    def subset(self, numbers: np.ndarray) -> og.Reader:
        """Return the reader of some rows."""
        part, every = copy.copy(self), self._every(numbers)
        part.rows, part._tokens = len(numbers), [self._tokens[i] for i in every]
        part.labels = None if self.labels is None else self.labels[every]
        return part

    def describe(self) -> dict[str, Any]:
        """Return the number of rows, and digests of tokens and labels."""
        ids = np.concatenate([np.int64(e.ids) for e in self._tokens])
        labels = b"" if self.labels is None else self.labels.tobytes()
        digest = [zlib.crc32(ids.tobytes()), zlib.crc32(labels)]
        return {"kind": "texts", "rows": self.rows, "digest": digest}


class Encoding:
    """Tokens of texts, as the inputs of a model take them.

    Args:
        model: has the inputs.
        source: as the option `tokenizer` of `Embeddings`.
        home: folder of the model, None if it has none.
        length: tokens of a text, unless the model states another number.
    """

    def __init__(self, model: onnx.ModelProto, source: Any, home: Path | None, length: int) -> None:
        types = {x.name: x.type.tensor_type for x in model.graph.input}
        own = {t.name for t in model.graph.initializer}
        if "input_ids" not in types or (others := types.keys() - own - {*INPUTS}):
            found = sorted(types) if "input_ids" not in types else sorted(others)
            raise ValueError(f"texts are for models with inputs {list(INPUTS)}: not {found}")
        self._dtypes = {
            name: onnx_ir.DataType(types[name].elem_type).numpy()
            for name in INPUTS
            if name in types
        }
        if "attention_mask" not in types:
            warnings.warn(
                "the model has no input attention_mask: what fills shorter texts changes their "
                "embeddings, unless the model itself leaves it out",
                stacklevel=2,
            )
        dims = types["input_ids"].shape.dim
        self._fixed = (dims[1].dim_value or None) if len(dims) > 1 else None
        self._tokenizer = _tokenizer(source, home)
        self._tokenizer.enable_truncation(self._fixed or length)
        self._tokenizer.no_padding()
        ids = [i for pad in _PADS if (i := self._tokenizer.token_to_id(pad)) is not None]
        self._pad = ids[0] if ids else 0

    def tokens(self, texts: Sequence[str]) -> list[Any]:
        """Return the encodings of texts."""
        return list(self._tokenizer.encode_batch(list(texts)))

    def batch(self, tokens: Sequence[Any]) -> dict[str, np.ndarray]:
        """Return encodings as inputs, padded to the longest."""
        ids, mask, _ = og.pad_sequences([e.ids for e in tokens], self._pad, self._fixed)
        types, _, _ = og.pad_sequences([e.type_ids for e in tokens], 0, self._fixed)
        columns = dict(zip(INPUTS, (ids, mask, types), strict=True))
        return {name: columns[name].astype(dtype) for name, dtype in self._dtypes.items()}


def _tokenizer(source: Any, home: Path | None) -> Any:
    """Return a tokenizer that is given, or that of a path, or one beside the model."""
    try:
        import tokenizers
    except ImportError as e:
        raise ImportError("texts need the library tokenizers: pip install tokenizers") from e
    if hasattr(source, "to_str"):
        return tokenizers.Tokenizer.from_str(source.to_str())
    places = [Path(source)] if source is not None else []
    if folder := places[0] if places and places[0].is_dir() else home if source is None else None:
        places = [folder / name for name in _TOKENIZERS]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        where = [str(place) for place in places] or "beside a model that is no path"
        raise ValueError(f"no tokenizer {where}: pass tokenizer=, a tokenizer.json or vocab.txt")
    try:
        if path.suffix == ".json":
            return tokenizers.Tokenizer.from_file(str(path))
        words = path.read_text(encoding="utf-8").split()
        cased = any(word != word.lower() for word in words if word[0] != "[")
        return tokenizers.BertWordPieceTokenizer(str(path), lowercase=not cased)
    except Exception as e:  # the library raises nothing more precise
        raise ValueError(f"{str(path)!r} cannot be read: {e}") from None


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of texts."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        if path.suffix == ".jsonl":
            lines = [(i, line) for i, line in enumerate(file, 1) if line.strip()]
            rows = [_object(path, i, line) for i, line in lines]
        elif path.suffix in (".csv", ".tsv"):
            rows = list(csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ","))
        else:
            raise ValueError(f"{str(path)!r}: texts are in a .csv, .tsv or .jsonl file")
    if not rows:
        raise ValueError(f"{str(path)!r} has no rows")
    return rows


def _object(path: Path, number: int, line: str) -> dict[str, Any]:
    """Return the object on a line of JSON."""
    try:
        row = json.loads(line)
    except ValueError as e:
        raise ValueError(f"{str(path)!r}, line {number}: {e}") from None
    if not isinstance(row, dict):
        raise ValueError(f"{str(path)!r}, line {number}: it is no object, as {{'anchor': ...}}")
    return row


def columns_of(path: Path, rows: list[dict[str, Any]]) -> tuple[list[str], bool]:
    """Return the columns of texts, and whether there are scores; all rows have the same."""
    names = _texts_of(rows[0])
    scored = "score" in rows[0]
    if names[:2] != ["anchor", "positive"] or (scored and len(names) > 2):
        raise ValueError(
            f"{str(path)!r} has the columns {list(rows[0])}: it needs anchor, positive, and after "
            "these negative, or score"
        )
    for number, row in enumerate(rows, 1):
        place = f"{str(path)!r}, row {number}"
        if sorted(_texts_of(row)) != sorted(names) or ("score" in row) != scored:
            raise ValueError(f"{place}: it has {list(row)}, and the first row {list(rows[0])}")
        for name in names:
            if not isinstance(row[name], str) or not row[name].strip():
                raise ValueError(f"{place}: {name!r} is no text")
        if scored:
            row["score"] = _number(place, row["score"])
    return names, scored


def _texts_of(row: dict[str, Any]) -> list[str]:
    """Return the columns of a row that hold texts."""
    return [n for n in row if n in ("anchor", "positive") or str(n).startswith("negative")]


def _number(place: str, score: Any) -> float:
    """Return a score as a finite number."""
    try:
        number = float(score)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{place}: the score {score!r} is no number")
    return number
