"""The files of an encoder-decoder with the weights of the joined model after training."""

from __future__ import annotations

import re
from collections.abc import Iterator
from hashlib import sha1
from typing import Any, NamedTuple

import numpy as np
from onnx import ModelProto

from onnxgrad.errors import printable
from onnxgrad.language.encoder_decoder import (
    CACHED,
    PREFIX,
    STATES,
    join_encoder_decoder,
    without_cache,
)
from onnxgrad.model.feeds import names_without_default
from onnxgrad.model.notes import read_adapters
from onnxgrad.model.read import ModelLike, read
from onnxgrad.model.traversal import reads
from onnxgrad.model.weights import constant_refs, replace
from onnxgrad.training.parameters.choice import default_rows
from onnxgrad.training.parameters.equal_constants import separate_merged
from onnxgrad.training.parameters.roles import QUANTIZED

_MERGED = re.compile(r"_merged_\d+$")  # of a weight of a merged decoder


def split_encoder_decoder(
    trained: ModelLike, encoder: ModelLike, decoder: ModelLike, *others: ModelLike
) -> list[ModelProto]:
    """Return the files of an encoder-decoder with the weights of a trained joined model.

    Each is as it was, but for the values of the weights: inputs, outputs, caches and names stay. A
    weight that several files store is the same in all.

    Args:
        trained: the model of `join_encoder_decoder` after training; with `add_lora`, `merge_lora`
            of it.
        encoder: the file as it was before.
        decoder: likewise. For adapters that stay apart, as beside integer weights, `add_lora` to
            both files before they are joined, and pass these.
        others: further files with the same weights: `decoder_with_past_model.onnx`,
            `decoder_model_merged.onnx`. A weight is found by its values before the training.

    Returns:
        The encoder, the decoder, and each of the others.

    Raises:
        ValueError: `trained` is not the joined model of these files, or another file has weights
            that are not theirs, or lacks one: it would compute something else.
        ModelError: a model cannot be read.

    Examples:
        >>> import onnx, onnxgrad as og
        >>> encoder = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     e (float[N,2] x) => (float[N,2] last_hidden_state)
        ...     <float[2,2] w = {1, 2, 3, 4}> { last_hidden_state = MatMul(x, w) }''')
        >>> decoder = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     d (float[N,2] encoder_hidden_states) => (float[N,2] logits)
        ...     <float[2,2] w = {5, 6, 7, 8}> { logits = MatMul(encoder_hidden_states, w) }''')
        >>> joined = og.language.join_encoder_decoder(encoder, decoder)
        >>> weights = {"decoder.w": [[0, 1], [2, 3]]}
        >>> changed = og.graph.replace_initializers_into_onnx(joined, weights)
        >>> for file in og.language.split_encoder_decoder(changed, encoder, decoder):
        ...     print(onnx.numpy_helper.to_array(file.graph.initializer[0]).tolist())
        [[1.0, 2.0], [3.0, 4.0]]
        [[0.0, 1.0], [2.0, 3.0]]
    """
    changes = _Changes(join_encoder_decoder(encoder, decoder), read(trained))
    files = [separate_merged(read(file)) for file in (encoder, decoder, *others)]
    found = [
        list(changes.of(file, "" if i == 0 else PREFIX, _name(i))) for i, file in enumerate(files)
    ]
    names = [{one.joined for one in each} for each in found]
    if lost := changes.names - names[0] - names[1]:
        raise ValueError(f"no constant of the encoder and the decoder is the trained {_list(lost)}")
    for i, file in list(enumerate(files))[2:]:
        changes.check_known(file, _name(i))
        used = _read_with_cache(files[1], file)
        _require_all({one.joined for one in found[1] if one.name in used} - names[i], i, files[1])
    return [
        replace(file, {one.name: one.value for one in each})
        for file, each in zip(files, found, strict=True)
    ]


def _require_all(lost: set[str], index: int, decoder: ModelProto) -> None:
    """Raise if a further file lacks trained weights of the decoder: it would use the old ones."""
    if lost:
        remedy = "make it from the trained decoder"
        if read_adapters(decoder):
            remedy = "it has no adapters, and the trained decoder works without this file"
        raise ValueError(
            f"{_name(index)} has no constant that is the trained {_list(lost)}: {remedy}"
        )


class _Found(NamedTuple):
    """A constant of a file, which weight of the joined model it is, and its new value."""

    name: str
    joined: str
    value: np.ndarray


class _Changes:
    """The weights that a training changed, by their values before."""

    def __init__(self, before: ModelProto, after: ModelProto) -> None:
        new = {ref.name: ref.array() for ref in constant_refs(after)}
        old = {ref.name: ref.array() for ref in constant_refs(before)}
        lost = [n for n, a in old.items() if n not in new or new[n].shape != a.shape]
        more = [row.name for row in default_rows(after) if row.name not in old]
        if lost or more:
            remedy = "pass merge_lora of it" if read_adapters(after) else "pass the files it is of"
            raise ValueError(
                f"the trained model is not the joined one of these files, as to "
                f"{_list(lost or more)}: {remedy}"
            )
        self.names: set[str] = set()
        self._known: set[Any] = set()  # what any weight was, trained or not
        self._by_values: dict[Any, list[tuple[str, np.ndarray]]] = {}
        for name, array in old.items():
            views = [(array, new[name])]
            if array.ndim == 2:
                views.append((array.T, new[name].T))
            self._known.update(_key(view) for view, _ in views)
            if array.tobytes() != new[name].tobytes():
                self.names.add(name)
                for view, value in views:
                    self._by_values.setdefault(_key(view), []).append((name, value))

    def of(self, file: ModelProto, prefix: str, where: str) -> Iterator[_Found]:
        """Yield the constants of a file that changed.

        Raises:
            ValueError: values before the training do not say which weight a constant is.
        """
        for row, ref in _rows_and_refs(file):
            options = self._by_values.get(_key(ref.array()), [])
            plain = _MERGED.sub("", ref.name)
            own = (prefix + plain, plain)
            named = next((o for name in own for o in options if o[0] == name), None)
            if not options or (named is None and (row.size == 1 or not row.is_weight)):
                continue  # a constant that only has the same numbers
            joined, value = options[0] if named is None else named
            if named is None and any(not np.array_equal(value, other) for _, other in options):
                raise ValueError(
                    f"{ref.name!r} of {where} may be one of {_list(name for name, _ in options)}, "
                    "which were equal before the training: export this file again"
                )
            yield _Found(ref.name, joined, value)

    def check_known(self, file: ModelProto, where: str) -> None:
        """Raise if a file has weights, or scales of integer weights, that are none of these."""
        for row, ref in _rows_and_refs(file):
            weight = row.is_weight or row.why.startswith(QUANTIZED) or "stored integers" in row.why
            if weight and _key(ref.array()) not in self._known:
                raise ValueError(
                    f"{where} has {row.name!r}, which no tensor of the encoder and the decoder is: "
                    "it is of another model, or quantized or optimized otherwise. Make it from the "
                    "trained decoder"
                )


def _rows_and_refs(file: ModelProto) -> Iterator[tuple[Any, Any]]:
    rows = {row.name: row for row in default_rows(file)}
    return ((rows[ref.name], ref) for ref in constant_refs(file) if ref.name in rows)


def _key(array: np.ndarray) -> Any:
    return str(array.dtype), array.shape, sha1(np.ascontiguousarray(array).tobytes()).digest()


def _list(names: Any) -> str:
    every = sorted(names)
    shown = ", ".join(repr(printable(name)) for name in every[:3])
    return shown + (f" and {len(every) - 3} more" if len(every) > 3 else "")


def _name(index: int) -> str:
    return ("the encoder", "the decoder")[index] if index < 2 else f"the file {index + 1}"


def _read_with_cache(decoder: ModelProto, other: ModelProto) -> set[str]:
    """Return the constants of the decoder that `other`, the same with a cache, computes with.

    If what is computed of the states of the encoder alone is cached, these are the other ones.
    """
    plain = without_cache(decoder)
    inputs = names_without_default(other)
    if CACHED in inputs or not any(".encoder." in x and x.startswith("past") for x in inputs):
        return {ref.name for ref in constant_refs(plain)}
    of_tokens = {x for x in names_without_default(plain) if x != STATES}
    of_states = {STATES}
    constants: dict[str, set[str]] = {}  # of which a value is computed
    needed: set[str] = set()
    for node in plain.graph.node:
        read = list(reads(node))
        if not of_tokens.isdisjoint(read):
            of_tokens.update(node.output)
            needed.update(c for x in read for c in constants.get(x, {x}))
        elif not of_states.isdisjoint(read):
            of_states.update(node.output)
        else:
            from_constants = {c for x in read for c in constants.get(x, {x})}
            constants |= {y: from_constants or {y} for y in node.output}
    return needed
