"""Texts that a language model goes on with, by onnxruntime-genai or by a plain session."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, load_model_from_string

from onnxgrad.adapters.files import load_adapter
from onnxgrad.adapters.session_files import read_arrays
from onnxgrad.checks import check_count
from onnxgrad.errors import argument, unknown
from onnxgrad.language.cached import Cached
from onnxgrad.language.folders import ModelFolder, file_of_adapter, load_folder
from onnxgrad.language.tokenizer import Tokenizer, as_tokenizer
from onnxgrad.model.read import read
from onnxgrad.reporting import frames_inside
from onnxgrad.training.trainer import Trainer


@dataclass(frozen=True)
class Choice:
    """How the next token is chosen: the most probable one, or drawn at a temperature above 0."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0 or not 0 < self.top_p <= 1:
            raise ValueError(
                f"temperature={self.temperature} must be 0 or more, and top_p={self.top_p} above 0 "
                "and at most 1"
            )

    def of(self, scores: np.ndarray, rng: np.random.Generator) -> int:
        """Return a token by its scores (V,)."""
        if not self.temperature:
            return int(scores.argmax())
        scores = scores.astype(np.float64) / self.temperature
        p = np.exp(scores - scores.max())
        p /= p.sum()
        order = np.argsort(-p, kind="stable")
        before = np.cumsum(p[order]) - p[order]
        kept = order[before < self.top_p]
        return int(rng.choice(kept, p=p[kept] / p[kept].sum()))


def generate(
    model: Any,
    prompts: Any,
    max_new_tokens: int = 64,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    tokenizer: Any = None,
    adapter: str | None = None,
) -> Any:
    """Return how a language model goes on with prompts.

    A folder of onnxruntime-genai runs there, if that is installed and has the device of the folder.
    Otherwise each token is a call of an ordinary session, which keeps the caches of the model.

    Args:
        model: a `ModelFolder`, or the path of one; or a `Trainer` or a model with a `tokenizer`.
        prompts: a text, a chat `[{"role": ..., "content": ...}, ...]`, or a list of these.
        max_new_tokens: how many tokens to generate, at most; a token that ends a text ends it.
        temperature: 0 takes the most probable token, others draw: the larger, the more alike are
            the probabilities.
        top_p: draw from the most probable tokens that have this probability together.
        seed: of the draws.
        tokenizer: as for `texts`; None: the tokenizer of the folder.
        adapter: name of an adapter of the folder, as `save_folder(..., adapter=...)` wrote it.

    Returns:
        The new text, without the prompt and without special tokens; a list for a list.

    Raises:
        ValueError: an option out of range, no tokenizer, or a prompt without a token.

    Examples:
        >>> import onnx, onnxgrad as og
        >>> from tokenizers import Tokenizer, models
        >>> words = Tokenizer(models.WordLevel({"tick": 0, "tock": 1}, unk_token="tick"))
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (int64[N,T] input_ids) => (float[N,T,2] logits) <float[2,2] w = {0.0, 1, 1, 0}>
        ...     { logits = Gather(w, input_ids) }''')
        >>> og.language.generate(model, "tick", 3, tokenizer=words)
        'tock tick tock'
    """
    choice = Choice(temperature, top_p, seed)
    check_count("max_new_tokens", max_new_tokens)
    is_chat = bool(prompts) and all(isinstance(m, Mapping) and "role" in m for m in prompts)
    several = isinstance(prompts, (list, tuple)) and not is_chat
    given = [*prompts] if several else [prompts]
    folder = _as_folder(model)
    if tokenizer is None and folder is None:
        raise ValueError("pass the tokenizer, as its folder: this model is not in one")
    own = as_tokenizer(folder if tokenizer is None else tokenizer)
    ids = [_encode_prompt(own, prompt) for prompt in given]
    running = None if folder is None else _genai_model(folder)
    if folder is not None and running is not None:
        tokens = _by_genai(running, folder, ids, max_new_tokens, choice, adapter)
    else:
        proto = read(model.model if isinstance(model, Trainer) else folder or model)
        if adapter is not None:
            proto = load_adapter(proto, _adapter_of(folder, adapter))
        about = _as_folder(tokenizer) if folder is None else folder
        tokens = _by_session(proto, own, about, ids, max_new_tokens, choice)
    found = [own.decode(each) for each in tokens]
    return found if several else found[0]


def _as_folder(model: Any) -> ModelFolder | None:
    if isinstance(model, ModelFolder):
        return model
    is_path = isinstance(model, (str, os.PathLike)) and os.path.isdir(model)
    return load_folder(model) if is_path else None


def _adapter_of(folder: ModelFolder | None, name: str) -> Path:
    """Return the file of an adapter; raise ValueError if there is none."""
    if folder is None:
        raise ValueError(f"{argument('adapter', name)} is of a folder, which this model is not in")
    file = file_of_adapter(folder.path, name)
    if not file.is_file():
        raise unknown("adapter", name, sorted(f.stem for f in file.parent.glob("*.onnx_adapter")))
    inputs = {x.name for x in load_model_from_string(folder.model.read_bytes()).graph.input}
    if other := [tensor for tensor in read_arrays(file) if tensor not in inputs]:
        raise ValueError(
            f"{str(file)!r} has {other[0]!r}, which is no input of {folder.model.name!r}: it is an "
            "adapter of another base"
        )
    return file


def _encode_prompt(tokenizer: Tokenizer, prompt: Any) -> list[int]:
    """Return the tokens of a prompt, without one that ends it."""
    text, special = prompt, True
    if not isinstance(prompt, str):
        if tokenizer.chat_template is None:
            raise ValueError("the prompt is a chat, and the tokenizer has no chat template")
        text, special = tokenizer.chat_template.render(prompt, True), False
    ids = tokenizer.encode([text], special)[0][0].tolist()
    while special and len(ids) > 1 and ids[-1] == tokenizer.eos_id:
        del ids[-1]
    if not ids and tokenizer.bos_id is not None:
        ids = [tokenizer.bos_id]
    if not ids:
        raise ValueError(f"the prompt {text!r} has no token")
    return ids


def _genai_model(folder: ModelFolder) -> Any:
    """Return the model of onnxruntime-genai, or None: another folder, or one that it cannot run."""
    if folder.kind != "genai":
        return None
    try:
        import onnxruntime_genai as genai

        return genai.Model(str(folder.path))
    except ImportError:
        return None
    except Exception as e:  # such as a folder for another device
        warnings.warn(
            f"onnxruntime-genai does not run {str(folder.path)!r} here, an ordinary session on the "
            f"CPU does: {e}",
            stacklevel=frames_inside() + 1,
        )
        return None


def _by_genai(
    model: Any,
    folder: ModelFolder,
    prompts: list[list[int]],
    count: int,
    choice: Choice,
    adapter: str | None,
) -> Iterator[list[int]]:
    """Yield the new tokens for each prompt."""
    import onnxruntime_genai as genai

    adapters = genai.Adapters(model)
    if adapter is not None:
        adapters.load(str(_adapter_of(folder, adapter)), adapter)
    nodes = load_model_from_string(folder.model.read_bytes()).graph.node
    attributes = (a for node in nodes for a in node.attribute if a.name == "local_window_size")
    window = max((a.i for a in attributes), default=0)  # the caches must have room for it
    for ids in prompts:
        most = min(len(ids) + count, folder.context_length or len(ids) + count)
        options: dict[str, Any] = {"do_sample": choice.temperature > 0}
        if choice.temperature:
            options |= {"temperature": choice.temperature, "random_seed": choice.seed}
            options |= {"top_k": 0, "top_p": choice.top_p}
        params = genai.GeneratorParams(model)
        params.set_search_options(max_length=max(most, window), **options)
        generator = genai.Generator(model, params)
        if adapter is not None:
            generator.set_active_adapter(adapters, adapter)
        generator.append_tokens(ids)
        while not generator.is_done() and generator.token_count() < most:
            generator.generate_next_token()
        yield [int(i) for i in generator.get_sequence(0)[len(ids) :]]


def _by_session(
    proto: ModelProto,
    tokenizer: Tokenizer,
    folder: ModelFolder | None,
    prompts: list[list[int]],
    count: int,
    choice: Choice,
) -> Iterator[list[int]]:
    """Yield the new tokens for each prompt."""
    cached = Cached(proto, {} if folder is None else folder.input_names)
    ends = {*(folder.eos_ids if folder is not None else ()), tokenizer.eos_id}
    limit = None if folder is None else folder.context_length
    for ids in prompts:
        rng = np.random.default_rng(choice.seed)  # a prompt has the same text alone and in a list
        cached.begin()
        found: list[int] = []
        while len(found) < count and (limit is None or len(ids) + len(found) < limit):
            token = choice.of(cached.scores(found[-1:] or ids), rng)
            if token in ends:
                break
            found.append(token)
        yield found
