"""`split_encoder_decoder`: writes a trained joined model's weights back to encoder and decoder."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha1
from typing import Any

import numpy as np
from onnx import ModelProto

from onnxgrad.errors import argument, join_first, printable, unknown
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
from onnxgrad.model.weights import constant_refs, replace_constants
from onnxgrad.training.parameters.choice import Tensor, default_rows
from onnxgrad.training.parameters.equal_constants import separate_merged
from onnxgrad.training.parameters.roles import QUANTIZED

_MERGED_NAME = re.compile(r"_merged_\d+$")  # suffix of weight names in a merged decoder


ConstantPlace = str | tuple[int, str]  # a constant: its name in all files, or (file index, name)
ConstantPlaces = ConstantPlace | Sequence[ConstantPlace]
_ConstantsByName = dict[str, tuple[Tensor, np.ndarray]]


def split_encoder_decoder(
    trained: ModelLike,
    encoder: ModelLike,
    decoder: ModelLike,
    *others: ModelLike,
    mapping: Mapping[str, ConstantPlaces] | None = None,
) -> list[ModelProto]:
    """Return encoder and decoder models with the weights of the trained joined model.

    Only the values of weights change: inputs, outputs, caches and names stay. A weight that several
    files store gets the same values in all of them. Weights are found by their values before the
    training; with `mapping` by name, so that the model may have been joined in any way, as by
    `attach`.

    Args:
        trained: the model of `join_encoder_decoder` after training; if it has adapters by
            `add_lora`, the result of `merge_lora`. With `mapping`, any model whose weights have the
            shapes of the files' weights.
        encoder: the encoder before the training.
        decoder: the decoder before the training. For adapters that are not merged, as with integer
            weights, apply `add_lora` to both files before they are joined, and pass the results.
        others: further files with the same weights: `decoder_with_past_model.onnx`,
            `decoder_model_merged.onnx`.
        mapping: `{name in trained: name in the files}`, or `{name in trained: (file, name)}` with
            0 for the encoder, 1 for the decoder, 2 for the first of `others`, and so on; or a list
            of such places. A weight that the mapping leaves out is found by its name, which may
            begin with "decoder." in all files but the encoder. A file in which a weight has the
            transposed shape gets the transposed weight.

    Returns:
        The encoder, the decoder, and each of `others`.

    Raises:
        ValueError: `trained` is not the joined model of these files; or one of `others` has weights
            that the encoder and the decoder do not have, or lacks a trained weight. With `mapping`:
            an unknown name or another shape, trained weights that no file has, or weights of a file
            that are not in `trained`.
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

        Files that `attach` has joined, so that the weight of the decoder is called `top.w`:

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
        return _replace_constants_by_trained_weights(read(trained), protos, mapping)
    changes = _ChangedWeights(join_encoder_decoder(encoder, decoder), read(trained))
    files = [separate_merged(file) for file in protos]
    found = [
        changes.new_values(file, PREFIX if i else "", _model_role(i))
        for i, file in enumerate(files)
    ]
    names = [{name for name, _ in each.values()} for each in found]
    if lost := changes.names - names[0] - names[1]:
        raise ValueError(
            f"neither the encoder nor the decoder has the trained {_quoted_names(lost)}: pass the "
            f"files that were joined, or name places by {argument('mapping')}"
        )
    for i, file in list(enumerate(files))[2:]:
        changes.check_known(file, _model_role(i))
        used = _constants_used_with_cache(files[1], file)
        if (
            lost := {name for constant, (name, _) in found[1].items() if constant in used}
            - names[i]
        ):
            remedy = "export it from the trained decoder"
            if read_adapters(files[1]):
                remedy = "it has no adapters; leave it out, the trained decoder works without it"
            raise ValueError(f"{_model_role(i)} lacks the trained {_quoted_names(lost)}: {remedy}")
    return [
        replace_constants(file, {constant: value for constant, (_, value) in each.items()})
        for file, each in zip(files, found, strict=True)
    ]


def _replace_constants_by_trained_weights(
    trained: ModelProto, protos: Sequence[ModelProto], mapping: Mapping[str, ConstantPlaces]
) -> list[ModelProto]:
    """Return `protos` with trained weights, found by `mapping` or by name, as constants.

    Raises:
        ValueError: a weight of `trained` or of a file has no counterpart, and its value changed.
    """
    new = _float_constants(trained)

    def count_known_names(file: ModelProto) -> int:
        return sum(r.name in new or PREFIX + r.name in new for r in constant_refs(file))

    # weights that an exporter has merged may have been separated before the training
    files = [max(file, separate_merged(file), key=count_known_names) for file in protos]
    before = [_float_constants(file) for file in files]
    places = _weight_name_by_constant(mapping, new, before)
    matched = [("the trained model", new, {*places.values()}, before)]
    for i, constants in enumerate(before):
        placed = {name for index, name in places if index == i}
        matched.append((_model_role(i), constants, placed, [new]))
    for where, constants, placed, others in matched:
        kept = {_array_key(array) for other in others for _, array in other.values()}
        weights = {n: a for n, (row, a) in constants.items() if row.is_weight and n not in placed}
        if lost := [name for name, array in weights.items() if _array_key(array) not in kept]:
            raise ValueError(
                f"{where} has {_quoted_names(lost)}, without a counterpart of the same name: name "
                f"its place by {argument('mapping')}, or merge adapters first"
            )
    values: list[dict[str, np.ndarray]] = [{} for _ in files]
    for (i, name), source in places.items():
        value, old = new[source][1], before[i][name][1]
        values[i][name] = value.T if value.T.shape == old.shape != value.shape else value
    return [replace_constants(file, each) for file, each in zip(files, values, strict=True)]


def _weight_name_by_constant(
    mapping: Mapping[str, ConstantPlaces], new: _ConstantsByName, before: Sequence[_ConstantsByName]
) -> dict[tuple[int, str], str]:
    """Return {(file index, constant name): name of the trained weight that replaces the constant}.

    Raises:
        ValueError: `mapping` has an unknown name.
    """
    places: dict[tuple[int, str], str] = {}
    every = [(i, name) for i, constants in enumerate(before) for name in constants]
    for name, given in mapping.items():
        if name not in new:
            raise unknown(f"trained weight ({argument('mapping')})", name, new)
        for place in [given] if isinstance(given, (str, tuple)) else given:
            index, constant = (None, place) if isinstance(place, str) else place
            chosen = [(i, n) for i, n in every if index in (None, i)]
            if constant not in (known := [n for _, n in chosen]):
                raise unknown(f"constant ({argument('mapping')})", constant, known)
            places |= {place: name for place in chosen if place[1] == constant}
    former = {name: before[i][constant][1] for (i, constant), name in places.items()}
    for i, constant in every:
        array = before[i][constant][1]
        named = PREFIX + constant if i and PREFIX + constant in new else constant
        if (i, constant) in places or named not in new or new[named][1].shape != array.shape:
            continue
        # otherwise two different weights share a name
        if np.array_equal(former.setdefault(named, array), array):
            places[i, constant] = named
    return places


class _ChangedWeights:
    """The weights that a training has changed, found in files by their values before training."""

    def __init__(self, before: ModelProto, after: ModelProto) -> None:
        new = {ref.name: ref.array() for ref in constant_refs(after)}
        old = {ref.name: ref.array() for ref in constant_refs(before)}
        lost = [n for n, a in old.items() if n not in new or new[n].shape != a.shape]
        more = [row.name for row in default_rows(after) if row.name not in old]
        if lost or more:
            remedy = "pass the files that were joined"
            if read_adapters(after):
                remedy = "pass the result of merge_lora"
            raise ValueError(
                "the trained model is not the joined model of these files, which differ in "
                f"{_quoted_names(lost or more)}: {remedy}"
            )
        self.names: set[str] = set()
        self._known: set[Any] = set()  # `_array_key` of all weights before the training
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
        """Return {constant of a file: (name in the joined model, new value)} for changed weights.

        Raises:
            ValueError: values before the training do not say which weight a constant is.
        """
        found = {}
        for constant, (row, array) in _float_constants(file).items():
            options = self._by_values.get(_array_key(array), [])
            plain = _MERGED_NAME.sub("", constant)
            named = next((o for n in (prefix + plain, plain) for o in options if o[0] == n), None)
            if not options or (named is None and (row.size == 1 or not row.is_weight)):
                continue  # the constant may have equal numbers by chance
            joined, value = options[0] if named is None else named
            if named is None and any(not np.array_equal(value, other) for _, other in options):
                raise ValueError(
                    f"{constant!r} of {where} has the values of several joined weights, "
                    f"{_quoted_names(n for n, _ in options)}, which were equal before training: "
                    f"export this file again, or name its weight by {argument('mapping')}"
                )
            found[constant] = joined, value
        return found

    def check_known(self, file: ModelProto, where: str) -> None:
        """Raise `ValueError` if the joined model lacks a weight or quantization scale of `file`."""
        for row, array in _float_constants(file).values():
            weight = row.is_weight or row.why.startswith(QUANTIZED) or "stored integers" in row.why
            if weight and _array_key(array) not in self._known:
                raise ValueError(
                    f"{where} has {row.name!r}, with values that neither the encoder nor the "
                    "decoder has: it belongs to another model, or was quantized or optimized in "
                    "another way. Export it from the trained decoder"
                )


def _float_constants(file: ModelProto) -> _ConstantsByName:
    """Return {name: (entry of `trainable(file)`, array)} of a model file's float constants."""
    rows = {row.name: row for row in default_rows(file)}
    return {r.name: (rows[r.name], r.array()) for r in constant_refs(file) if r.name in rows}


def _array_key(array: np.ndarray) -> Any:
    """Return a key that is equal for arrays of the same dtype, shape and values."""
    return str(array.dtype), array.shape, sha1(np.ascontiguousarray(array).tobytes()).digest()


def _quoted_names(names: Iterable[str]) -> str:
    """Return the first three quoted names and the count of further names, as one text."""
    return join_first([repr(printable(name)) for name in sorted(names)], 3)


def _model_role(index: int) -> str:
    """Return "the encoder" for file 0, "the decoder" for file 1, and else "the file 3", ..."""
    return ("the encoder", "the decoder")[index] if index < 2 else f"the file {index + 1}"


def _constants_used_with_cache(decoder: ModelProto, other: ModelProto) -> set[str]:
    """Return names of constants of `decoder` that `other`, the decoder with a cache, needs too.

    If the cache holds the values that depend on the states of the encoder alone, `other` lacks the
    constants that compute them.
    """
    plain = without_cache(decoder)
    inputs = names_without_default(other)
    if CACHED in inputs or not any(".encoder." in x and x.startswith("past") for x in inputs):
        return {ref.name for ref in constant_refs(plain)}
    of_tokens = {x for x in names_without_default(plain) if x != STATES}
    of_states = {STATES}
    constants: dict[str, set[str]] = {}  # {value: the constants from which it is computed}
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
