"""`merge_artifacts`: return the model for inference with the weights of a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto

from onnxgrad.artifacts.folder import Manifest, read_manifest
from onnxgrad.errors import join_first
from onnxgrad.model.read import read
from onnxgrad.model.weights import replace_constants
from onnxgrad.training.array_files import read_arrays

_LISTED = 5


def merge_artifacts(
    folder: str | os.PathLike, checkpoint: str | os.PathLike | None = None, prefix: str = ""
) -> ModelProto:
    """Return the model of a folder of artifacts with the weights and buffers of a checkpoint.

    Args:
        folder: the folder that `generate_artifacts` wrote.
        checkpoint: a file in the form of `checkpoint.safetensors`; slots in it are not read, and
            may be missing. None: the one in `folder`.
        prefix: the prefix that `generate_artifacts` got.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a damaged file, or a checkpoint of another model: the message names the
            tensors.
        ModelError: the model cannot be read.

    Examples:
        >>> import tempfile, onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,2] x) => (float[N,1] y) <float[2,1] w = {1.0, 2.0}> { y = MatMul(x, w) }
        ... ''')
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     manifest = og.artifacts.generate_artifacts(
        ...         model, None, None, "MSELoss", "SGD", folder)
        ...     merged = og.artifacts.merge_artifacts(folder)
        >>> onnx.numpy_helper.to_array(merged.graph.initializer[0]).ravel().tolist()
        [1.0, 2.0]
    """
    home = Path(folder)
    manifest = read_manifest(home, prefix)
    path = home / manifest["files"]["checkpoint"] if checkpoint is None else Path(checkpoint)
    arrays = read_checkpoint(path, manifest)
    return replace_constants(read(home / manifest["files"]["model"]), arrays)


def read_checkpoint(path: Path, manifest: Manifest) -> dict[str, np.ndarray]:
    """Return the weights and buffers (running statistics) of a checkpoint file, by name.

    Raises:
        FileNotFoundError: the checkpoint is missing.
        ValueError: the checkpoint is damaged, or belongs to another model.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: name a checkpoint of these artifacts")
    try:
        arrays, metadata = read_arrays(path)
    except ValueError as e:
        raise ValueError(f"{e}; name another checkpoint") from None
    expected = [*manifest["weights"], *manifest["buffers"]]
    known = {entry["name"] for entry in (*expected, *manifest["slots"])}
    if others := sorted(arrays.keys() - known):
        raise ValueError(
            f"{path} is a checkpoint of another model: the artifacts have no tensors "
            f"{join_first([*map(repr, others)], _LISTED)}"
        )
    for entry in expected:
        _check_checkpoint_tensor(path, entry, arrays)
    if metadata.get("model", manifest["digest"]) != manifest["digest"]:
        raise ValueError(
            f"{path} is a checkpoint of another model, with tensors of the same names and shapes, "
            "but other nodes or other weights that do not train: merge it with the folder that it "
            "was generated with"
        )
    return {entry["name"]: arrays[entry["name"]] for entry in expected}


def _check_checkpoint_tensor(
    path: Path, entry: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> None:
    """Raise `ValueError` unless a checkpoint holds the tensor of a manifest entry, and it is
    finite.
    """
    name, dtype, shape = entry["name"], entry["dtype"], tuple(entry["shape"])
    if name not in arrays:
        raise ValueError(
            f"{path} is a checkpoint of another model: it has no {name!r}. Name a "
            "checkpoint of these artifacts"
        )
    own = arrays[name]
    if own.shape != shape or str(own.dtype) != dtype:
        raise ValueError(
            f"{path} is a checkpoint of another model: its {name!r} is {own.dtype} {own.shape}, "
            f"not {dtype} {shape}. Name a checkpoint of these artifacts"
        )
    if not np.isfinite(own).all():
        raise ValueError(
            f"{path}: {name!r} holds NaN or infinity: the training diverged: train again with a "
            "lower rate"
        )
