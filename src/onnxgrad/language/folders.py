"""`load_folder`: reads folders of language models of onnxruntime-genai and optimum."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from onnxgrad.errors import ModelError, argument
from onnxgrad.language.chat import ChatTemplate
from onnxgrad.language.tokenizer import SPECIAL, Tokenizer

GENAI, OPTIMUM = "genai_config.json", "config.json"
_MODELS = ("model.onnx", "onnx/model.onnx")  # names of the model file in folders of optimum
# keys of the context length in a config.json
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "seq_length")


@dataclass(frozen=True)
class ModelFolder:
    """A folder that holds a language model; `load_folder` returns it.

    Functions that take a model or its path take the folder: `Trainer(folder)`,
    `add_lora(folder, "*proj*")`.

    Attributes:
        path: the folder.
        kind: "genai" or "optimum".
        model: the file of the model.
        config: the content of `genai_config.json` or `config.json`.
        pad_id: id of the token at padding, or None.
        bos_id: id of the token that begins a text, or None.
        eos_ids: ids of the tokens that end a text; the first one is appended to texts.
        vocab_size: number of tokens for which the model has scores; None if it is unknown.
        context_length: most tokens that the model takes; None if it is unknown.
        input_names: the model's names of the inputs "input_ids", "attention_mask" and others.

    Examples:
        >>> import json, tempfile, onnx, onnxgrad as og
        >>> from pathlib import Path
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (int64[N,T] input_ids) => (float[N,T,4] logits) <float[4,4] w = {
        ...         1.0, 0, 0, 0, 0, 1.0, 0, 0, 0, 0, 1.0, 0, 0, 0, 0, 1.0}>
        ...     { logits = Gather(w, input_ids) }''')
        >>> with tempfile.TemporaryDirectory() as path:
        ...     onnx.save(model, Path(path, "model.onnx"))
        ...     config = {"vocab_size": 4, "eos_token_id": 3, "max_position_embeddings": 64}
        ...     _ = Path(path, "config.json").write_text(json.dumps(config))
        ...     folder = og.load_folder(path)
        ...     folder.kind, folder.model.name, folder.eos_ids, folder.context_length
        ('optimum', 'model.onnx', (3,), 64)
    """

    path: Path
    kind: str
    model: Path
    config: Mapping[str, Any] = field(repr=False)
    pad_id: int | None = None
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    vocab_size: int | None = None
    context_length: int | None = None
    input_names: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __fspath__(self) -> str:
        return str(self.model)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the folder.

        Raises:
            ImportError: the library `tokenizers` is not installed.
            ValueError: the folder has no `tokenizer.json`, or it cannot be read.
        """
        ids = {"pad": self.pad_id, "bos": self.bos_id, "eos": next(iter(self.eos_ids), None)}
        return Tokenizer.from_folder(self.path, ids)

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """The chat template of the tokenizer; None if the folder has no chat template."""
        return self.tokenizer.chat_template


def load_folder(path: str | os.PathLike, file: str | None = None) -> ModelFolder:
    """Return the `ModelFolder` of a language model's folder of onnxruntime-genai or optimum.

    A folder of onnxruntime-genai has a `genai_config.json`, which names the file of the model; a
    folder of optimum has a `config.json`, and the model in `model.onnx` or `onnx/model.onnx`. Both
    have the files of the tokenizer. Only the small files of the configuration are read.

    Args:
        path: the folder.
        file: another file of the model in the folder, as "onnx/model_q4.onnx".

    Raises:
        ModelError: the folder has neither configuration, or lacks a file that it names.

    Examples:
        >>> import onnxgrad as og
        >>> og.load_folder("nowhere")
        Traceback (most recent call last):
        ...
        onnxgrad.errors.ModelError: 'nowhere' is no folder: pass the folder of a language model
    """
    if isinstance(path, ModelFolder):
        return path
    home = Path(path)
    if not home.is_dir():
        raise ModelError(f"{os.fspath(path)!r} is no folder: pass the folder of a language model")
    for name, read_folder in ((GENAI, _read_genai_folder), (OPTIMUM, _read_optimum_folder)):
        if (home / name).is_file():
            return read_folder(home, _read_json_object(home / name), file)
    raise ModelError(
        f"{os.fspath(path)!r} holds no language model: it has neither the {GENAI} of "
        f"onnxruntime-genai nor the {OPTIMUM} of optimum"
    )


def adapter_file(home: Path, name: str) -> Path:
    """Return the path at which a model folder keeps the adapter `name`.

    Raises:
        ValueError: the name holds a folder, or characters that no file name has.
    """
    if not name or Path(name).name != name or not name.isprintable():
        raise ValueError(f"{argument('adapter', name)} must be a plain file name, without a folder")
    return home / "adapters" / f"{name}.onnx_adapter"


def is_folder(path: str | os.PathLike) -> bool:
    """Return whether `path` is a folder with the configuration of a language model."""
    return any(os.path.isfile(os.path.join(path, name)) for name in (GENAI, OPTIMUM))


def _read_genai_folder(home: Path, config: dict[str, Any], file: str | None) -> ModelFolder:
    """Return the `ModelFolder` of onnxruntime-genai's layout, read from `genai_config.json`."""
    model = config.get("model", {})
    decoder = model.get("decoder", {})
    if not file and not decoder.get("filename"):
        pipeline = ", but a pipeline of several files" if decoder.get("pipeline") else ""
        raise ModelError(
            f"{str(home / GENAI)!r} names no ONNX file{pipeline}: pass `file`, the name of a "
            "file in the folder"
        )
    names = {n: v for n, v in decoder.get("inputs", {}).items() if isinstance(v, str)}
    return ModelFolder(
        home,
        "genai",
        _existing_file(home, file or decoder["filename"]),
        config,
        **_special_token_ids(model),
        vocab_size=model.get("vocab_size"),
        context_length=model.get("context_length"),
        input_names=names,
    )


def _read_optimum_folder(home: Path, config: dict[str, Any], file: str | None) -> ModelFolder:
    """Return the `ModelFolder` of optimum's layout, read from `config.json`."""
    written = home / "generation_config.json"
    generation = _read_json_object(written) if written.is_file() else {}
    text = config.get("text_config") or {}  # models for texts and images have this object
    every = {**text, **config, **{n: v for n, v in generation.items() if v is not None}}
    return ModelFolder(
        home,
        "optimum",
        _existing_file(home, file) if file else _optimum_model_file(home),
        config,
        **_special_token_ids(every),
        vocab_size=every.get("vocab_size"),
        context_length=next((every[n] for n in _LENGTHS if every.get(n)), None),
    )


def _optimum_model_file(home: Path) -> Path:
    """Return the path of an optimum folder's model: `model.onnx`, or the only file `.onnx`."""
    found = [*home.glob("*.onnx"), *home.glob("onnx/*.onnx")]
    usual = [home / name for name in _MODELS if home / name in found]
    if usual or len(found) == 1:
        return (usual or found)[0]
    names = sorted(file.relative_to(home).as_posix() for file in found)
    has = f"has {names}" if names else "has no file .onnx"
    raise ModelError(
        f"{str(home)!r} should hold {' or '.join(_MODELS)}, and {has}"
        + (": say which with load_folder(path, file=...)" if names else "")
    )


def _existing_file(home: Path, name: str) -> Path:
    """Return the path of a file in a folder; raise `ModelError` if there is no such file."""
    if not (home / name).is_file():
        raise ModelError(f"{str(home)!r} lacks its ONNX file {name!r}: copy the file there")
    return home / name


def _special_token_ids(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ids of special tokens in a configuration, as fields of a `ModelFolder`."""
    pad, bos, eos = (config.get(f"{name}_token_id") for name in SPECIAL)
    ids = eos if isinstance(eos, Sequence) else [] if eos is None else [eos]
    return {"pad_id": _first_token_id(pad), "bos_id": _first_token_id(bos), "eos_ids": tuple(ids)}


def _first_token_id(ids: Any) -> int | None:
    """Return a token id, or the first id of a list; None if `ids` is None or empty."""
    return (ids[0] if ids else None) if isinstance(ids, Sequence) else ids


def _read_json_object(file: Path) -> dict[str, Any]:
    """Return the dict that a JSON file holds."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ModelError(f"{str(file)!r} cannot be read as JSON: {e}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{str(file)!r} holds no JSON object: export the folder again")
    return content
