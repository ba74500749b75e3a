"""The files of an encoder-decoder with the weights of the joined model after training."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha1
from typing import Any

import numpy as np
from onnx import ModelProto

from onnxgrad.errors import argument, printable, unknown
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
from onnxgrad.model.traversal import names_read_by
from onnxgrad.model.weights import constant_refs, replace
from onnxgrad.training.parameters.choice import Tensor, default_rows
from onnxgrad.training.parameters.equal_constants import separate_merged
from onnxgrad.training.parameters.roles import QUANTIZED

_MERGED = re.compile(r"_merged_\d+$")  # of a weight of a merged decoder


Place = str | tuple[int, str]  # the name of a constant, in all files or in one
Places = Place | Sequence[Place]
_Constants = dict[str, tuple[Tensor, np.ndarray]]


def split_encoder_decoder(
    trained: ModelLike,
    encoder: ModelLike,
    decoder: ModelLike,
    *others: ModelLike,
    mapping: Mapping[str, Places] | None = None,
) -> list[ModelProto]:
    """Return the files of an encoder-decoder with the weights of a trained joined model.

    Only the values of weights change: inputs, outputs, caches and names stay. A weight that several
    files store is the same in all. With `mapping`, the model may have been joined in any way, as by
    `attach`: weights are found by name instead of by their values before the training.

    Args:
        trained: the model of `join_encoder_decoder` after training; with `add_lora`, `merge_lora`
            of it. With `mapping`, any model whose weights have the shapes of the files' weights.
        encoder: the file before the training.
        decoder: likewise. For adapters that stay apart, as beside integer weights, `add_lora` to
            both files before they are joined, and pass these.
        others: further files with the same weights: `decoder_with_past_model.onnx`,
            `decoder_model_merged.onnx`. A weight is found by its values before the training.
        mapping: `{name in trained: name in the files}`, or `{name in trained: (file, name)}` with
            0 for the encoder, 1 for the decoder, 2 for the first of the others...; or a list of
            such places. A weight that it leaves out has its own name in a file, or in all but the
            first this name behind "decoder.". Where a file has the transposed shape, it gets the
            transposed weight.

    Returns:
        The encoder, the decoder, and each of the others.

    Raises:
        ValueError: `trained` is not the joined model of these files, or another file has weights
            that are not theirs, or lacks one: it would compute something else. With `mapping`: an
            unknown name or another shape, trained weights for which no file has a place, or
            weights of a file that are not in `trained`.
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

        Files that were joined otherwise, so that the weight of the decoder is called `top.w`:

        >>> joined = og.attach(encoder, decoder, {"last_hidden_state": "encoder_hidden_states"},
        ...                    prefix="top.")
        >>> changed = og.graph.replace_initializers_into_onnx(joined, {"top.w": [[0, 1], [2, 3]]})
        >>> files = og.language.split_encoder_decoder(changed, encoder, decoder,
        ...                                  mapping={"top.w": (1, "w")})
        >>> onnx.numpy_helper.to_array(files[1].graph.initializer[0]).tolist()
        [[0.0, 1.0], [2.0, 3.0]]
    """
    protos = [read(file) for file in (encoder, decoder, *others)]
    if mapping is not None:
        return _write_by_name(read(trained), protos, mapping)
    changes = _Changes(join_encoder_decoder(encoder, decoder), read(trained))
    files = [separate_merged(file) for file in protos]
    found = [
        changes.new_values(file, PREFIX if i else "", _file_text(i)) for i, file in enumerate(files)
    ]
    names = [{name for name, _ in each.values()} for each in found]
    if lost := changes.names - names[0] - names[1]:
        raise ValueError(
            f"no constant of the encoder and the decoder is the trained {_quoted_names(lost)}"
        )
    for i, file in list(enumerate(files))[2:]:
        changes.check_known(file, _file_text(i))
        used = _read_with_cache(files[1], file)
        if lost := {name for own, (name, _) in found[1].items() if own in used} - names[i]:
            remedy = "make it from the trained decoder"
            if read_adapters(files[1]):
                remedy = "it has no adapters, and the trained decoder works without this file"
            raise ValueError(
                f"{_file_text(i)} has no constant that is the trained {_quoted_names(lost)}: "
                f"{remedy}"
            )
    return [
        replace(file, {own: value for own, (_, value) in each.items()})
        for file, each in zip(files, found, strict=True)
    ]


def _write_by_name(
    trained: ModelProto, protos: Sequence[ModelProto], mapping: Mapping[str, Places]
) -> list[ModelProto]:
    """Return the files with the weights to which `mapping`, or their own names, lead.

    Raises:
        ValueError: a weight of `trained` or of a file has no counterpart, and its value changed.
    """
    new = _float_constants(trained)

    def count_known_names(file: ModelProto) -> int:
        return sum(r.name in new or PREFIX + r.name in new for r in constant_refs(file))

    # parameters that an exporter merged may have been separated before the training
    files = [max(file, separate_merged(file), key=count_known_names) for file in protos]
    before = [_float_constants(file) for file in files]
    places = _places_by_name(mapping, new, before)
    matched = [("the trained model", new, {*places.values()}, before)]
    for i, constants in enumerate(before):
        own = {name for index, name in places if index == i}
        matched.append((_file_text(i), constants, own, [new]))
    for where, constants, own, others in matched:
        kept = {_array_key(array) for other in others for _, array in other.values()}
        weights = {n: a for n, (row, a) in constants.items() if row.is_weight and n not in own}
        if lost := [name for name, array in weights.items() if _array_key(array) not in kept]:
            raise ValueError(
                f"{where} has {_quoted_names(lost)}, and the name does not tell which weight that "
                f"is: name it by {argument('mapping')}, or merge adapters before"
            )
    values: list[dict[str, np.ndarray]] = [{} for _ in files]
    for (i, name), source in places.items():
        value, old = new[source][1], before[i][name][1]
        values[i][name] = value.T if value.T.shape == old.shape != value.shape else value
    return [replace(file, each) for file, each in zip(files, values, strict=True)]


def _places_by_name(
    mapping: Mapping[str, Places], new: _Constants, before: Sequence[_Constants]
) -> dict[tuple[int, str], str]:
    """Return the name of the trained weight for each constant (file, name) that has one.

    Raises:
        ValueError: `mapping` has an unknown name.
    """
    places: dict[tuple[int, str], str] = {}
    every = [(i, name) for i, constants in enumerate(before) for name in constants]
    for name, given in mapping.items():
        if name not in new:
            raise unknown(f"trained weight ({argument('mapping')})", name, new)
        for place in [given] if isinstance(given, (str, tuple)) else given:
            index, own = (None, place) if isinstance(place, str) else place
            chosen = [(i, n) for i, n in every if index in (None, i)]
            if own not in (known := [n for _, n in chosen]):
                raise unknown(f"constant ({argument('mapping')})", own, known)
            places |= {place: name for place in chosen if place[1] == own}
    former = {name: before[i][own][1] for (i, own), name in places.items()}
    for i, own in every:
        array = before[i][own][1]
        named = PREFIX + own if i and PREFIX + own in new else own
        if (i, own) in places or named not in new or new[named][1].shape != array.shape:
            continue
        if np.array_equal(former.setdefault(named, array), array):  # or two weights have this name
            places[i, own] = named
    return places


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
                f"{_quoted_names(lost or more)}: {remedy}"
            )
        self.names: set[str] = set()
        self._known: set[Any] = set()  # what any weight was, trained or not
        self._by_values: dict[Any, list[tuple[str, np.ndarray]]] = {}
        for name, array in old.items():
            views = [(array, new[name]), (array.T, new[name].T)][: 1 + (array.ndim == 2)]
            self._known.update(_array_key(view) for view, _ in views)
            if array.tobytes() != new[name].tobytes():
                self.names.add(name)
                for view, value in views:
                    self._by_values.setdefault(_array_key(view), []).append((name, value))

    def new_values(
        self, file: ModelProto, prefix: str, where: str
    ) -> dict[str, tuple[str, np.ndarray]]:
        """Return for each constant of a file that changed the joined weight and its new value.

        Raises:
            ValueError: values before the training do not say which weight a constant is.
        """
        found = {}
        for own, (row, array) in _float_constants(file).items():
            options = self._by_values.get(_array_key(array), [])
            plain = _MERGED.sub("", own)
            named = next((o for n in (prefix + plain, plain) for o in options if o[0] == n), None)
            if not options or (named is None and (row.size == 1 or not row.is_weight)):
                continue  # a constant that only has the same numbers
            joined, value = options[0] if named is None else named
            if named is None and any(not np.array_equal(value, other) for _, other in options):
                raise ValueError(
                    f"{own!r} of {where} may be one of {_quoted_names(n for n, _ in options)}, "
                    "which were equal before the training: export this file again, or name it by "
                    f"{argument('mapping')}"
                )
            found[own] = joined, value
        return found

    def check_known(self, file: ModelProto, where: str) -> None:
        """Raise if a file has weights, or scales of integer weights, that are none of these."""
        for row, array in _float_constants(file).values():
            weight = row.is_weight or row.why.startswith(QUANTIZED) or "stored integers" in row.why
            if weight and _array_key(array) not in self._known:
                raise ValueError(
                    f"{where} has {row.name!r}, which no tensor of the encoder and the decoder is: "
                    "it is of another model, or quantized or optimized otherwise. Make it from the "
                    "trained decoder"
                )


def _float_constants(file: ModelProto) -> _Constants:
    """Return the float constants of a file by name: the row of `trainable`, and the array."""
    rows = {row.name: row for row in default_rows(file)}
    return {r.name: (rows[r.name], r.array()) for r in constant_refs(file) if r.name in rows}


def _array_key(array: np.ndarray) -> Any:
    return str(array.dtype), array.shape, sha1(np.ascontiguousarray(array).tobytes()).digest()


def _quoted_names(names: Iterable[str]) -> str:
    every = sorted(names)
    shown = ", ".join(repr(printable(name)) for name in every[:3])
    return shown + (f" and {len(every) - 3} more" if len(every) > 3 else "")


def _file_text(index: int) -> str:
    return ("the encoder", "the decoder")[index] if index < 2 else f"the file {index + 1}"


def _read_with_cache(decoder: ModelProto, other: ModelProto) -> set[str]:
    """Return the constants of the decoder that `other`, the same with a cache, computes with.

    If the cache has the values that depend on the states of the encoder alone, it leaves out
    the constants of these.
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
        read = list(names_read_by(node))
        if not of_tokens.isdisjoint(read):
            of_tokens.update(node.output)
            needed.update(c for x in read for c in constants.get(x, {x}))
        elif not of_states.isdisjoint(read):
            of_states.update(node.output)
        else:
            from_constants = {c for x in read for c in constants.get(x, {x})}
            constants |= {y: from_constants or {y} for y in node.output}
    return needed
