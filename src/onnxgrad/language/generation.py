"""`generate`: lets a language model continue prompts."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import ModelProto, load_model_from_string

from onnxgrad.adapters.files import load_adapter
from onnxgrad.adapters.session_files import read_adapter_file
from onnxgrad.checks import check_count
from onnxgrad.errors import ModelError, argument, unknown
from onnxgrad.graph.infer import infer
from onnxgrad.language.folders import ModelFolder, adapter_file, load_folder
from onnxgrad.language.tokenizer import Tokenizer, as_tokenizer
from onnxgrad.model.convert import to_ir, to_proto
from onnxgrad.model.feeds import caches_with_next_values
from onnxgrad.model.read import read
from onnxgrad.operators.shapes import dims, rank
from onnxgrad.reporting import frames_inside
from onnxgrad.runtime.predictor import Predictor
from onnxgrad.training.filled import BRANCH, MASK, POSITIONS, cache_sizes, remove_cache_windows
from onnxgrad.training.trainer import Trainer


class CachedModel:
    """A language model with a key-value cache, which returns logits of the next token of one text.

    Args:
        model: a model with the input `input_ids`, and maybe `attention_mask`, `position_ids` and
            caches: inputs with "past" in their names, each with an output that has "present"
            instead. Its first output, or `logits`, is (rows, tokens, vocabulary).
        names: the model's names of these inputs, if it has others.

    Raises:
        ModelError: the model has another input, or a cache of unknown size.
    """

    def __init__(self, model: ModelProto, names: Mapping[str, str]) -> None:
        graph = to_ir(model)
        if remove_cache_windows(graph.graph):
            model = to_proto(graph)
        infer(graph)
        inputs = {str(x.name): x for x in graph.graph.inputs}
        outputs = {str(y.name): y for y in graph.graph.outputs}
        self._caches = caches_with_next_values(model)  # {cache input: its output}
        self._empty = {name: _empty_cache(inputs[name]) for name in self._caches}
        usual = ("input_ids", MASK, POSITIONS, BRANCH)
        self._names = {names.get(n, n): n for n in usual if names.get(n, n) in inputs}
        scores = "logits" if "logits" in outputs else next(iter(outputs))
        self._predictor = Predictor(model, [scores, *self._caches.values()])
        known = {*self._names, *self._caches}
        if other := [name for name in self._predictor.inputs if name not in known]:
            raise ModelError(
                "generation feeds tokens, masks, positions and caches, and the model also has the "
                f"inputs {other}: give them a default, or export the model without them"
            )
        self.clear_cache()

    def clear_cache(self) -> None:
        """Empty the cache of past tokens, to begin another text."""
        self._held, self._tokens = dict(self._empty), []  # type: tuple[dict, list[int]]

    def next_token_logits(self, tokens: list[int]) -> np.ndarray:
        """Append token ids to the text; return the logits (V,) of the next token."""
        self._tokens += tokens
        new = tokens if self._caches else self._tokens
        total, first = len(self._tokens), len(self._tokens) - len(new)
        given = {
            "input_ids": [new],
            MASK: np.ones((1, total)),
            POSITIONS: [np.arange(first, total)],
            BRANCH: [first > 0],
        }
        feeds = {name: given[n] for name, n in self._names.items()}
        scores, *held = self._predictor.run(feeds | self._held)
        self._held = dict(zip(self._caches, held, strict=True))
        return scores[0, -1]


def _empty_cache(x: ir.Value) -> np.ndarray:
    """Return an array of past length 0 for the model's key-value cache input `x`."""
    heads, size = cache_sizes(x)
    if heads is None or size is None or x.dtype is None:
        raise ModelError(
            f"the cache {x.name!r} has the shape {dims(x)}, of which the number of heads and the "
            "size of a head must be known: export the model with these lengths"
        )
    return np.zeros([*[2] * (rank(x) == 5), 1, heads, 0, size], x.dtype.numpy())


@dataclass(frozen=True)
class TokenChoice:
    """How to choose the next token: the most probable one if `temperature` is 0, else a draw."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0 or not 0 < self.top_p <= 1:
            raise ValueError(
                f"{argument('temperature', self.temperature)} must be 0 or more, and "
                f"{argument('top_p', self.top_p)} above 0 and at most 1"
            )

    def choose_token(self, scores: np.ndarray, rng: np.random.Generator) -> int:
        """Return the id of the next token, chosen by the logits (V,) of the vocabulary."""
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
    """Return the texts by which a language model continues prompts.

    onnxruntime-genai runs folders that are written for it, if it is installed and has the device of
    the folder. Otherwise an ordinary session runs for each token, with the caches of the model.

    Args:
        model: a `ModelFolder` or its path; or a `Trainer` or a model, with `tokenizer`.
        prompts: a text, a chat `[{"role": ..., "content": ...}, ...]`, or a list of these.
        max_new_tokens: most tokens to generate; a token that ends a text stops earlier.
        temperature: 0 takes the most probable token; above 0, tokens are drawn, and the larger it
            is, the more alike their probabilities are.
        top_p: draw from the most probable tokens that have this probability together.
        seed: seed of the draws.
        tokenizer: as in `texts`; None: the tokenizer of the folder.
        adapter: name of an adapter in the folder, as written by `save_folder(..., adapter=...)`.

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
    choice = TokenChoice(temperature, top_p, seed)
    check_count("max_new_tokens", max_new_tokens)
    is_chat = bool(prompts) and all(isinstance(m, Mapping) and "role" in m for m in prompts)
    several = isinstance(prompts, (list, tuple)) and not is_chat
    given = [*prompts] if several else [prompts]
    folder = _model_folder(model)
    if tokenizer is None and folder is None:
        raise ValueError(
            f"the model is in no folder with a tokenizer: pass {argument('tokenizer')}, as its "
            "folder"
        )
    loaded = as_tokenizer(folder if tokenizer is None else tokenizer)
    ids = [_encode_prompt(loaded, prompt) for prompt in given]
    running = None if folder is None else _genai_model(folder)
    if folder is not None and running is not None:
        tokens = _generate_by_genai(running, folder, ids, max_new_tokens, choice, adapter)
    else:
        proto = read(model.model if isinstance(model, Trainer) else folder or model)
        if adapter is not None:
            proto = load_adapter(proto, _find_adapter(folder, adapter))
        about = _model_folder(tokenizer) if folder is None else folder
        tokens = _generate_by_session(proto, loaded, about, ids, max_new_tokens, choice)
    found = [loaded.decode(each) for each in tokens]
    return found if several else found[0]


def _model_folder(model: Any) -> ModelFolder | None:
    """Return `model` if it is a `ModelFolder`, or the folder at a path; None for other models."""
    if isinstance(model, ModelFolder):
        return model
    is_path = isinstance(model, (str, os.PathLike)) and os.path.isdir(model)
    return load_folder(model) if is_path else None


def _find_adapter(folder: ModelFolder | None, name: str) -> Path:
    """Return the path of the adapter `name`; raise `ValueError` unless it fits the model."""
    if folder is None:
        raise ValueError(
            f"{argument('adapter', name)} names an adapter in a folder: pass the folder as model"
        )
    file = adapter_file(folder.path, name)
    if not file.is_file():
        raise unknown("adapter", name, sorted(f.stem for f in file.parent.glob("*.onnx_adapter")))
    inputs = {x.name for x in load_model_from_string(folder.model.read_bytes()).graph.input}
    if other := [tensor for tensor in read_adapter_file(file) if tensor not in inputs]:
        raise ValueError(
            f"{str(file)!r} has {other[0]!r}, which is no input of {folder.model.name!r}: the "
            "adapter belongs to another base model"
        )
    return file


def _encode_prompt(tokenizer: Tokenizer, prompt: Any) -> list[int]:
    """Return the token ids of a prompt, without the end-of-text token."""
    text, special = prompt, True
    if not isinstance(prompt, str):
        if tokenizer.chat_template is None:
            raise ValueError(
                "the prompt is a chat, and the tokenizer has no chat template: pass a text"
            )
        text, special = tokenizer.chat_template.render(prompt, True), False
    ids = tokenizer.encode([text], special)[0][0].tolist()
    while special and len(ids) > 1 and ids[-1] == tokenizer.eos_id:
        del ids[-1]
    if not ids and tokenizer.bos_id is not None:
        ids = [tokenizer.bos_id]
    if not ids:
        raise ValueError(f"the prompt {text!r} has no token: pass a prompt with at least one word")
    return ids


def _genai_model(folder: ModelFolder) -> Any:
    """Return the folder's model in onnxruntime-genai; None if that package cannot run it."""
    if folder.kind != "genai":
        return None
    try:
        import onnxruntime_genai as genai

        return genai.Model(str(folder.path))
    except ImportError:
        return None
    except Exception as e:  # such as a folder for another device
        warnings.warn(
            f"onnxruntime-genai cannot run {str(folder.path)!r}, so that an ordinary session on "
            f"the CPU runs it: {e}",
            stacklevel=frames_inside() + 1,
        )
        return None


def _generate_by_genai(
    model: Any,
    folder: ModelFolder,
    prompts: list[list[int]],
    count: int,
    choice: TokenChoice,
    adapter: str | None,
) -> Iterator[list[int]]:
    """Yield the token ids that onnxruntime-genai generates after each prompt."""
    import onnxruntime_genai as genai

    adapters = genai.Adapters(model)
    if adapter is not None:
        adapters.load(str(_find_adapter(folder, adapter)), adapter)
    nodes = load_model_from_string(folder.model.read_bytes()).graph.node
    attributes = (a for node in nodes for a in node.attribute if a.name == "local_window_size")
    # the caches must have room for a local attention window
    window = max((a.i for a in attributes), default=0)
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


def _generate_by_session(
    proto: ModelProto,
    tokenizer: Tokenizer,
    folder: ModelFolder | None,
    prompts: list[list[int]],
    count: int,
    choice: TokenChoice,
) -> Iterator[list[int]]:
    """Yield the token ids that a session of onnxruntime generates after each prompt."""
    cached = CachedModel(proto, {} if folder is None else folder.input_names)
    ends = {*(folder.eos_ids if folder is not None else ()), tokenizer.eos_id}
    limit = None if folder is None else folder.context_length
    for ids in prompts:
        # seeded for each prompt, so that its text does not depend on other prompts
        rng = np.random.default_rng(choice.seed)
        cached.clear_cache()
        found: list[int] = []
        while len(found) < count and (limit is None or len(ids) + len(found) < limit):
            token = choice.choose_token(cached.next_token_logits(found[-1:] or ids), rng)
            if token in ends:
                break
            found.append(token)
        yield found
