"""`Tokenizer`: reads a file `tokenizer.json` and runs it by the library `tokenizers`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrad.errors import not_installed
from onnxgrad.language.chat import ChatTemplate, read_template

FILE, CONFIG, VOCABULARY = "tokenizer.json", "tokenizer_config.json", "vocab.txt"
SPECIAL = ("pad", "bos", "eos")
_SPECIAL_TOKENS = (*SPECIAL, "unk", "sep", "cls", "mask")
_USUAL_PADDING = ("[PAD]", "<pad>", "<|endoftext|>", "</s>")


def _tokenizers_library() -> Any:
    """Return the library `tokenizers`; raise `ImportError` with a remedy if it is missing."""
    try:
        import tokenizers
    except ImportError as e:
        raise not_installed("reading texts", "tokenizers", "text") from e
    return tokenizers


class Tokenizer:
    """A tokenizer with the special tokens and the chat template of its folder.

    Args:
        backend: a `tokenizers.Tokenizer`.
        special: texts of special tokens by "pad", "bos", "eos" and others.
        chat_template: the template of conversations.
        ids: ids of special tokens that `special` lacks.

    Attributes:
        size: number of tokens, with added tokens.
        pad_id, bos_id, eos_id: ids of special tokens; None if the tokenizer lacks the token.
        fill_id: the id of padding: `pad_id`, or the id of a token with a usual name, or 0.
        max_length: number of tokens after which the file of the tokenizer cuts texts; None if it
            does not. `encode` does not cut.
    """

    def __init__(
        self,
        backend: Any,
        special: Mapping[str, str] | None = None,
        chat_template: ChatTemplate | None = None,
        ids: Mapping[str, int | None] | None = None,
    ) -> None:
        self.backend, self.special = backend, dict(special or {})
        self.chat_template = chat_template
        self.max_length: int | None = (backend.truncation or {}).get("max_length")
        backend.no_truncation()
        backend.no_padding()
        self.size = int(backend.get_vocab_size(with_added_tokens=True))
        found = {name: backend.token_to_id(text) for name, text in self.special.items()}
        given = {name: i for name, i in (ids or {}).items() if i is not None}
        known = given | {name: i for name, i in found.items() if i is not None}
        self.pad_id, self.bos_id, self.eos_id = (known.get(name) for name in SPECIAL)
        fills = [self.pad_id, *map(backend.token_to_id, _USUAL_PADDING)]
        self.fill_id: int = next((i for i in fills if i is not None and i >= 0), 0)

    @classmethod
    def from_folder(
        cls, folder: str | os.PathLike, ids: Mapping[str, int | None] | None = None
    ) -> Tokenizer:
        """Return the `Tokenizer` of a folder; it encodes as transformers' `AutoTokenizer` does.

        Raises:
            ImportError: the library `tokenizers` is not installed.
            ValueError: there is no `tokenizer.json`, or it cannot be read.
        """
        home = Path(folder)
        if not (home / FILE).is_file():
            raise ValueError(
                f"{os.fspath(folder)!r} has no {FILE}: let transformers write it, with "
                "AutoTokenizer.from_pretrained(...).save_pretrained(folder)"
            )
        backend = _read_tokenizers_backend(home / FILE)
        config = _config_with_special_tokens(home)
        tokens = {name: config.get(f"{name}_token") for name in _SPECIAL_TOKENS}
        texts = {n: t.get("content") if isinstance(t, dict) else t for n, t in tokens.items()}
        special = {name: text for name, text in texts.items() if text is not None}
        return cls(backend, special, read_template(home, config, special), ids)

    def truncating_backend(self, max_length: int) -> Any:
        """Return a copy of `backend` that cuts texts after `max_length` tokens."""
        copy = type(self.backend).from_str(self.backend.to_str())
        copy.enable_truncation(max_length)
        return copy

    def encode(
        self, texts: Sequence[str], special: bool = True
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return for each text its token ids (T,), int32, and the tokens' character spans (T, 2).

        Args:
            texts: the texts.
            special: whether to add special tokens around each text.
        """
        found = self.backend.encode_batch(list(texts), add_special_tokens=special)
        return [
            (np.array(e.ids, np.int32), np.array(e.offsets, np.int64).reshape(-1, 2)) for e in found
        ]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, leaving out special tokens."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=True)


def as_tokenizer(source: Any) -> Tokenizer:
    """Return the `Tokenizer` of a folder, a file, or an object of tokenizers or transformers.

    Args:
        source: a `ModelFolder`; the path of a folder, of a `tokenizer.json` or of the `vocab.txt`
            of a BERT; a `tokenizers.Tokenizer`; or a fast tokenizer of transformers. It is not
            changed; the result neither cuts nor pads.

    Raises:
        ValueError: `source` is none of these.
        ImportError: the library `tokenizers` is not installed.
    """
    if isinstance(source, Tokenizer):
        return source
    if isinstance(known := getattr(source, "tokenizer", None), Tokenizer):
        return known
    if hasattr(source, "backend_tokenizer"):
        backend, template = source.backend_tokenizer, source.chat_template
        special = {
            n: t for n in _SPECIAL_TOKENS if (t := getattr(source, f"{n}_token", None)) is not None
        }
        copy = type(backend).from_str(backend.to_str())
        return Tokenizer(copy, special, template and ChatTemplate(template, special))
    if hasattr(source, "encode_batch"):
        return Tokenizer(_tokenizers_library().Tokenizer.from_str(source.to_str()))
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        if path.is_dir() and not (path / FILE).is_file() and (path / VOCABULARY).is_file():
            path = path / VOCABULARY
        if path.is_file() and path.name != FILE:
            return Tokenizer(_read_tokenizers_backend(path))
        return Tokenizer.from_folder(path.parent if path.name == FILE else path)
    raise ValueError(
        "a tokenizer is a folder, a path, or an object of tokenizers or transformers, not "
        f"{type(source).__name__}"
    )


def _read_tokenizers_backend(path: Path) -> Any:
    """Return the `tokenizers.Tokenizer` of a `tokenizer.json`, or of a BERT `vocab.txt`."""
    library = _tokenizers_library()
    try:
        if path.suffix != ".txt":
            return library.Tokenizer.from_file(str(path))
        words = path.read_text(encoding="utf-8").split()
        cased = any(word != word.lower() for word in words if not word.startswith("["))
        pieces = library.BertWordPieceTokenizer(str(path), lowercase=not cased)
        return library.Tokenizer.from_str(pieces.to_str())
    except Exception as e:  # the library raises bare Exceptions
        raise ValueError(f"{str(path)!r} cannot be read as the file of a tokenizer: {e}") from None


def _config_with_special_tokens(home: Path) -> dict[str, Any]:
    """Return the dict of `tokenizer_config.json` in a folder, with special tokens filled in."""
    config: dict[str, Any] = {}
    for name in ("special_tokens_map.json", CONFIG):
        if (home / name).is_file():
            try:
                config |= json.loads((home / name).read_text(encoding="utf-8"))
            except ValueError as e:
                raise ValueError(f"{str(home / name)!r} cannot be read as JSON: {e}") from None
    return config
