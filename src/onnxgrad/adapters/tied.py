"""Adapters of weights that an embedding and a last layer share: PEFT has one for each module."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from onnxgrad.adapters.names import tensor_names
from onnxgrad.adapters.torch_modules import Entry, Tensors
from onnxgrad.adapters.uses import EMBEDDING, LINEAR, Target
from onnxgrad.reporting import frames_inside
from onnxgrad.training.parameters.aliases import module_of

Paths = dict[str, dict[str, str]]  # by the module in the model, and the form of a use


def tied_paths(modules: Mapping[str, Target]) -> Paths:
    """Return the paths in PyTorch of the modules that share a weight, as far as nodes tell them."""
    found: Paths = {}
    for module, target in modules.items():
        paths = {}
        for use in target.uses:
            metadata = {entry.key: entry.value for entry in use.node.metadata_props}
            paths[use.form] = module_of(use.node.name, metadata)
        if {*paths} == {EMBEDDING, LINEAR} and all(paths.values()):
            found[module] = paths
    return found


def separate_entries(entries: Mapping[str, Entry], tied: Paths) -> dict[str, Entry]:
    """Return an entry for each module of PyTorch, of adapters of shared weights."""
    result: dict[str, Entry] = {}
    for module, entry in entries.items():
        for form, path in tied.get(module, {}).items():
            result[path] = replace(entry, tensors=_in_form(entry.tensors, form), path=path)
        if module not in tied:
            result[module] = entry
    return result


def join_tensors(
    found: Mapping[str, Tensors], tied: Paths, forms: Mapping[str, str]
) -> dict[str, Tensors]:
    """Return the tensors in a file by modules, those of modules that share a weight as one.

    Raises:
        ValueError: these differ, and the model has one weight.
    """
    result = dict(found)
    for module, paths in tied.items():
        given = {path: result.pop(path) for path in paths.values() if path in result}
        if not given:
            continue
        each = [_in_form(tensors, forms[module]) for tensors in given.values()]
        if any(not np.array_equal(each[0][n], x[n]) for x in each for n in each[0]):
            raise ValueError(
                f"{list(given)} share a weight in the model, and have several adapters in the file"
            )
        if len(given) < len(paths):
            warnings.warn(
                f"the adapter of {next(iter(given))!r} acts at {sorted(paths.values())} in the "
                "model, which share a weight; PEFT has it in one of these",
                stacklevel=frames_inside() + 1,
            )
        result[module] = each[0]
    return result


def _in_form(tensors: Tensors, form: str) -> Tensors:
    """Return the factors of an adapter as a layer or an embedding has them."""
    names = tensor_names(form, use_dora=False)
    other = tensor_names(EMBEDDING if form == LINEAR else LINEAR, use_dora=False)
    if {*tensors} != {*other}:
        return tensors
    return dict(zip(names, (tensors[name].T for name in other[::-1]), strict=True))
