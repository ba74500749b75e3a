"""Token classification: named entities, parts of speech."""

from __future__ import annotations

import html
import json
import os
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx

import onnxgrad as og
from onnxgrad.tasks.base import Task
from onnxgrad.tasks.labelled_texts import Text, classes_of, read_texts

__all__ = ["Tokens"]

_IGNORED, _BATCH = -100, 32
_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
_PADS = ("[PAD]", "<pad>", "<|endoftext|>", "</s>")


class _Row(NamedTuple):
    text: int  # the number of its text
    ids: np.ndarray
    types: np.ndarray
    words: np.ndarray  # of tokens that count, the number of their word in the text; -1 of others
    labels: np.ndarray


class Tokens(Task):
    """Labels of words, by a model with an output (rows, tokens, classes) of scores.

    The first token of a word has its label; special tokens and others have -100, which the loss
    ignores. A text of more than `max_length` tokens becomes several rows, which overlap: each word
    is labelled in one of them, and none begins within an entity. A warning counts such texts.
    A text with entities by characters is cut into words and marks, with BIO labels.

    Args:
        model: a model or a path. One with stored classes, or an output `logits`, gets a new last
            layer unless these are the classes; another one a linear layer on its features.
        data: a CoNLL file (on each line a word and, last, its label; an empty one ends a sentence);
            JSON lines (`.jsonl`) of `{"tokens": words, "tags": labels}` or `{"text": ...,
            "entities": [{"start": 0, "end": 5, "label": "PER"}]}`; or a list of such dicts.
        tokenizer: a `tokenizers.Tokenizer`, a fast one of transformers, or the path of a
            `tokenizer.json` or `vocab.txt`; None: one that lies beside the model.
        classes: their names, in order, if labels are numbers, or to have another order.
        at: the features of an encoder, (rows, tokens, features), if it has several such outputs.
        max_length: tokens of a row; None: where the tokenizer cuts, or else 512.
        stride: tokens that a row sees of the rows before and after it; at most a quarter of it.
        label_all: whether all tokens of a word are labelled, those after the first as `I-`.
        scheme: as for `og.EntityF1`.
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

    def __init__(
        self, model: Any, data: Any = None, tokenizer: Any = None, *,
        classes: Sequence[str] | None = None, at: str | None = None, max_length: int | None = None,
        stride: int = 32, label_all: bool = False, scheme: str | None = None, seed: int = 0,
    ) -> None:  # fmt: skip
        home = None if isinstance(model, onnx.ModelProto) else Path(model).parent
        proto = model if home is None else onnx.load(model)
        self._whole, self._cutting = (_tokenizer(tokenizer, home) for _ in range(2))
        self.max_length = max_length or (self._whole.truncation or {}).get("max_length", 512)
        self._cutting.enable_truncation(self.max_length)
        self._room = self.max_length - self._whole.num_special_tokens_to_add(False)
        self._stride, self._label_all = min(stride, self._room // 4), label_all
        self._whole.no_truncation()
        stored = _stored_classes(proto, home)
        texts = None if data is None else list(read_texts(data, classes or stored))
        self.classes = list(classes or classes_of(texts or [], stored))
        if not self.classes:
            raise ValueError("neither data nor the model says what the classes are: pass classes=")
        self.model = _with_head(proto, stored, self.classes, at, seed)
        self._inputs = [x.name for x in self.model.graph.input]
        if extra := sorted({*self._inputs}.difference(_INPUTS)):
            raise ValueError(f"the model has the inputs {extra}; a tokenizer gives {[*_INPUTS]}")
        self._joins = any(name.startswith("B-") for name in self.classes)
        options = {"axis": 2, "ignore_index": _IGNORED, "from_logits": None}
        self.loss = og.LOSSES["cross_entropy"].with_options(options)
        self.metrics = [*([og.EntityF1(self.classes, scheme)] if self._joins else []), "accuracy"]
        self.arguments: dict[str, Any] = {}
        self.data = None if texts is None else self._reader(self._rows(texts, learnt=True))

    def read(self, path: Any) -> og.Reader:
        """Return other rows for the same classes, from what `data` may be.

        Raises:
            ValueError: files that cannot be read, or a label that is no class.
        """
        return self._reader(self._rows(list(read_texts(path, self.classes)), learnt=True))

    def _reader(self, rows: Sequence[_Row]) -> og.Reader:
        X = {"input_ids": [row.ids for row in rows], "token_type_ids": [row.types for row in rows]}
        found = (self._whole.token_to_id(text) for text in _PADS)
        pad = {"input_ids": next((i for i in found if i is not None), 0)}
        masked = "attention_mask" in self._inputs  # without, rows of one length make a batch
        X = {name: column for name, column in X.items() if name in self._inputs}
        mask, value = ("attention_mask", pad) if masked else (None, None)
        labels = [row.labels for row in rows]
        return og.by_length(X, labels, mask=mask, value=value, y_value=_IGNORED)

    def _rows(self, texts: Sequence[Text], learnt: bool = False) -> list[_Row]:
        """Return the rows of all texts; if they are `learnt`, warn of labels that are not."""
        rows, counts = [], Counter[str]()
        for number, text in enumerate(texts):
            labels, inside = self._numbers(text, learnt)
            spans = np.array(text.words, np.int64).reshape(-1, 2)
            owners = _encode(text.text, spans, self._whole)[2]
            each, seen = np.bincount(owners[owners >= 0], minlength=len(spans)), 0
            for first, stop, begin, end in self._cut(each, text.labels or () if learnt else ()):
                ids, types, own = _encode(text.text, spans[begin:end], self._cutting)
                own = np.where(own >= 0, own + begin, -1)
                counted = (first <= own) & (own < stop)
                heads = counted & np.append(True, own[1:] != own[:-1])
                row = np.where(heads, labels[own], inside[own])
                row[~(counted if self._label_all else heads)] = _IGNORED
                rows.append(_Row(number, ids, types, np.where(heads, own, -1), row))
                seen += int(heads.sum())
            long = len(owners) > self.max_length
            counts[f"texts have more than {self.max_length} tokens and become several rows"] += long
            counts["words have more tokens than a row and are cut"] += int(sum(each > self._room))
            counts["words have no token of their own and are not learnt"] += len(spans) - seen
            counts["entities begin or end in a word, which is labelled whole"] += text.misfits
        if learnt and any(counts.values()):
            said = "; ".join(f"{n} {what}" for what, n in counts.items() if n)
            warnings.warn(f"of {len(texts)} texts: {said}", stacklevel=3)
        return rows

    def _numbers(self, text: Text, learnt: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return the class of the first token of each word, and that of its other tokens."""
        names = text.labels if learnt else ["O"] * len(text.words)
        numbers = {name: k for k, name in enumerate(self.classes)}
        if names is None:
            raise ValueError(f"{text.name} has no labels")
        if learnt and (wrong := [name for name in names if name not in numbers]):
            raise ValueError(f"{text.name}: {wrong[0]!r} is none of the classes {self.classes}")
        inside = [f"I-{name[2:]}" if name.startswith("B-") else name for name in names]
        first = [numbers.get(name, 0) for name in names]
        rest = [numbers.get(*pair) for pair in zip(inside, first, strict=True)]
        return np.array(first, np.int64), np.array(rest, np.int64)

    def _cut(self, each: np.ndarray, labels: Sequence[str]) -> Iterator[tuple[int, int, int, int]]:
        """Yield for each row the words that it labels, first and stop, and those that it sees.

        `each` are the numbers of tokens of the words. A row stops in front of an entity.
        """
        before, first = np.append(0, np.cumsum(each)), 0
        while first < len(each):
            begin = int(np.searchsorted(before, before[first] - self._stride))
            end = int(np.searchsorted(before, before[begin] + self._room, "right")) - 1
            end = stop = max(end, first + 1)
            if end < len(each):
                stop = int(np.searchsorted(before, before[end] - self._stride, "right")) - 1
                stop = last = max(stop, first + 1)
                while labels and stop > first and labels[stop].startswith("I-"):
                    stop -= 1
                stop = stop if stop > first else last
            yield first, stop, begin, end
            first = stop

    def predict(self, model: Any, inputs: Any) -> list[list[dict[str, Any]]]:
        """Return the entities of each text: characters `start` and `end`, `label` and `score`.

        A word has the class of its first token. BIO joins words to entities, whose score is the
        mean of the probabilities; where classes are no BIO, each word is an entity.

        Args:
            model: a trained model, a path, or a `Trainer`.
            inputs: a list of texts or of lists of words, which a space joins; or what `data` is.
        """
        import onnxruntime

        texts = list(read_texts(inputs, self.classes))
        rows = sorted(self._rows(texts), key=lambda row: len(row.ids))
        source = model.model if isinstance(model, og.Trainer) else model
        is_proto = isinstance(source, onnx.ModelProto)
        file = source.SerializeToString() if is_proto else os.fspath(source)
        session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        dtypes = {x.name: x.type[len("tensor(") : -1] for x in session.get_inputs()}
        shares = [np.zeros((len(text.words), len(self.classes))) for text in texts]
        reader = self._reader(rows).for_inputs(dict.fromkeys(dtypes)) if rows else None
        at = iter(rows)
        for X, *_ in reader.batches(_BATCH, None, 0) if reader else ():
            fed = {n: a.astype(dtypes[n].replace("float", "float32")) for n, a in X.items()}
            (scores,) = session.run([self.model.graph.output[0].name], fed)
            if scores.min() < 0 or not np.allclose(scores.sum(2), 1, atol=1e-3):  # no softmax yet
                scores = np.exp(scores - scores.max(2, keepdims=True))
            for share, row in zip(scores / scores.sum(2, keepdims=True), at, strict=False):
                heads = np.flatnonzero(row.words >= 0)
                shares[row.text][row.words[heads]] = share[heads]
        return [self._joined(*pair) for pair in zip(texts, shares, strict=True)]

    def _joined(self, text: Text, shares: np.ndarray) -> list[dict[str, Any]]:
        """Return the entities of a text, from the probabilities of the classes of its words."""
        found: list[dict[str, Any]] = []
        last = ""  # the kind of the entity of the word before
        for (start, end), share in zip(text.words, shares, strict=True):
            name = self.classes[share.argmax()] if share.any() else "O"
            prefix, _, kind = name.partition("-") if self._joins and name != "O" else ("", "", name)
            if prefix in ("I", "E") and kind == last:
                found[-1]["end"] = end
                found[-1]["score"].append(share.max())
            elif name != "O":
                found.append({"start": start, "end": end, "label": kind, "score": [share.max()]})
            last = "" if name == "O" else kind
        return [entity | {"score": float(np.mean(entity["score"]))} for entity in found]

    def write(
        self, inputs: Any, results: Iterable[Sequence[dict]], folder: str | os.PathLike
    ) -> list[Path]:
        """Write `entities.jsonl` and `entities.conll`, which `data` may be, and `entities.html`."""
        files: dict[str, list[str]] = {"jsonl": [], "conll": [], "html": ["<meta charset=utf-8>"]}
        for text, found in zip(read_texts(inputs, self.classes), results, strict=True):
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


def _encode(text: str, spans: np.ndarray, tokenizer: Any) -> tuple[np.ndarray, ...]:
    """Return ids and types of the tokens of some words, and the number of the word of each."""
    start, end = (spans[0, 0], spans[-1, 1]) if len(spans) else (0, 0)
    found = tokenizer.encode(text[start:end])
    begins, ends = np.array(found.offsets, np.int64).reshape(-1, 2).T + start
    own = np.searchsorted(spans[:, 1], begins, side="right")  # the first that ends behind it
    begun = np.append(spans[:, 0], len(text))[own] < ends
    own[~begun | np.array(found.special_tokens_mask, bool)] = -1
    return np.array(found.ids, np.int64), np.array(found.type_ids, np.int64), own


def _with_head(
    proto: onnx.ModelProto, stored: list[str], classes: list[str], at: str | None, seed: int
) -> onnx.ModelProto:
    """Return the model with one output, the scores of the classes."""
    outputs = {y.name: y.type.tensor_type.shape.dim for y in proto.graph.output}
    if at is None and (stored or "logits" in outputs):
        if len(outputs) > 1:
            proto = og.select_model_inputs_outputs(proto, ["logits"])
        if stored == classes:
            return proto
        return og.replace_head(proto, classes, activation=None, seed=seed)
    wide = [name for name, dims in outputs.items() if len(dims) == 3 and dims[2].dim_value]
    if at is None and len(wide) != 1:
        raise ValueError(f"at=None: of the outputs {[*outputs]}, name the features of tokens")
    return og.add_head(proto, classes, at or wide[0], seed=seed)


def _stored_classes(proto: onnx.ModelProto, home: Path | None) -> list[str]:
    """Return the classes that a model stores, or the `config.json` of transformers beside it."""
    for entry in proto.metadata_props:
        if entry.key == "onnxgrad.classes":
            return [str(name) for name in json.loads(entry.value)]
    path = None if home is None else home / "config.json"
    if path is None or not path.is_file() or all(y.name != "logits" for y in proto.graph.output):
        return []
    named = json.loads(path.read_text(encoding="utf-8")).get("id2label", {})
    return [str(named[key]) for key in sorted(named, key=int)]


def _tokenizer(source: Any, home: Path | None) -> Any:
    """Return a copy of the tokenizer of `source`, or of one that lies in the folder `home`."""
    try:
        import tokenizers
    except ImportError as e:
        raise ImportError("texts need tokenizers: pip install 'onnxgrad[text]'") from e
    if source is None and home is not None:
        places = (home / "tokenizer.json", home / "vocab.txt", home.parent / "tokenizer.json")
        source = next((path for path in places if path.is_file()), None)
    if source is None:
        raise ValueError("tokenizer=None, and no tokenizer.json or vocab.txt beside the model")
    if isinstance(source, (str, os.PathLike)) and Path(source).suffix == ".txt":
        words = Path(source).read_text(encoding="utf-8").split("\n")
        lower = all(word == word.lower() for word in words if not word.startswith("["))
        source = tokenizers.BertWordPieceTokenizer(os.fspath(source), lowercase=lower)
    elif isinstance(source, (str, os.PathLike)):
        source = tokenizers.Tokenizer.from_file(os.fspath(source))
    copy = tokenizers.Tokenizer.from_str(getattr(source, "backend_tokenizer", source).to_str())
    copy.no_padding()
    return copy
