"""`generate_artifacts`: the files with which a device trains a model."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto

from onnxgrad.artifacts.folder import added_to
from onnxgrad.artifacts.former import select_loss, select_optimizer
from onnxgrad.artifacts.manifest import FILES, MANIFEST, Manifest, manifest_of
from onnxgrad.artifacts.models import Models, build_models
from onnxgrad.artifacts.ort_format import write_ort
from onnxgrad.artifacts.versions import at_opset, with_ir_version
from onnxgrad.autodiff.quantized import straight_through_warning
from onnxgrad.graph.garbage import garbage_kept
from onnxgrad.model.read import ModelLike, read
from onnxgrad.model.write import save
from onnxgrad.optimizers import Optimizer
from onnxgrad.training.data import Dataset
from onnxgrad.training.identity import described
from onnxgrad.training.parameters.patterns import as_list
from onnxgrad.training.saving import serialized
from onnxgrad.training.setup import Setup
from onnxgrad.training.trainer import Trainer

CHECKPOINT = "onnxgrad.artifacts.1"  # the format, in the metadata of a checkpoint


def generate_artifacts(
    model: ModelLike,
    requires_grad: Iterable[str] | None = None,
    frozen_params: Iterable[str] | None = None,
    loss: Any = None,
    optimizer: str | Optimizer | None = None,
    artifact_directory: str | os.PathLike | None = None,
    prefix: str = "",
    *,
    additional_output_names: Iterable[str] | None = None,
    opset: int | None = None,
    ir_version: int | None = None,
    ort_format: bool = False,
    learning_rate: float = 1e-3,
    batch_norm: str = "frozen",
    dropout: Mapping[str, float] | None = None,
    clip_norm: float | None = None,
    loss_options: Mapping[str, Any] | None = None,
    loss_weights: Mapping[str, float] | None = None,
    class_weight: Any = None,
    sample_weight: bool = False,
    seed: int = 0,
) -> Manifest:
    """Write the files with which any onnxruntime trains a model, without this package.

    They are models in standard operators, the initial state, and a manifest; docs/devices.md says
    what each file takes and returns. A step computes what one of a `Trainer` with the same
    arguments computes. The first arguments, and `additional_output_names` and `ort_format`, are
    those of `onnxruntime.training.artifacts.generate_artifacts` of onnxruntime 1.19.

    Args:
        model: model, serialized model or path; never modified.
        requires_grad: names of the tensors that train, and patterns as `train` of `Trainer`; None:
            those that train by default.
        frozen_params: names and patterns of tensors that do not train; none of `requires_grad`.
        loss: as that of `Trainer`; or "MSELoss", "CrossEntropyLoss", "BCEWithLogitsLoss" or
            "L1Loss", also of one of several outputs. None: the model has an output that is the
            loss.
        optimizer: as that of `Trainer`; or "AdamW" or "SGD", which compute what they did there:
            "AdamW" has no weight decay and an eps of 1e-6, added before v is corrected, "adamw" a
            weight decay of 0.01 and an eps of 1e-8, added behind. None: no `optimizer_model.onnx`
            and no `step.onnx` are written.
        artifact_directory: the folder, which is created if it is missing; None: the current one.
            A call that fails leaves it as it was.
        prefix: of the names of all files.
        additional_output_names: tensors that `eval_model.onnx` returns beside the loss and the
            predictions: names of outputs, or of results of nodes.
        opset: largest version of the standard opset in all files; None: that of the model, at
            least 18. onnxruntime 1.16 needs 19, 1.17 needs 20.
        ir_version: the IR version of all files, such as 9 for onnxruntime 1.16 and 1.17; None: the
            lowest that fits.
        ort_format: also write each model in the format of onnxruntime, `.ort`.
        learning_rate: the default, which the manifest states; a client may pass another one in
            every step.
        batch_norm: as that of `Trainer`.
        dropout: as that of `Trainer`.
        clip_norm: as that of `Trainer`.
        loss_options: as those of `Trainer`.
        loss_weights: as those of `Trainer`.
        class_weight: as that of `Trainer`, but not "balanced".
        sample_weight: whether a batch has an input of sample weights.
        seed: of dropout.

    Returns:
        The manifest, as `training.json` holds it.

    Raises:
        ValueError: invalid arguments, unknown names, or names that the files need for something
            else.
        ModelError: the model cannot be read, or not be converted to that opset.
        NoGradientRule: an operator between the weights and the loss has no rule.
        OSError: the folder cannot be written.

    Examples:
        >>> import tempfile, onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,2] x) => (float[N,1] y) <float[2,1] w = {0.0, 0.0}> { y = MatMul(x, w) }
        ... ''')
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     manifest = og.generate_artifacts(model, ["w"], None, "MSELoss", "AdamW", folder)
        >>> [slot["name"] for slot in manifest["slots"]]
        ['w.m', 'w.v']
    """
    chosen, options = select_loss(loss, loss_options)
    _check_prefix(prefix)
    train, freeze = _names(requires_grad), _names(frozen_params) or []
    if both := sorted(set(train or ()) & set(freeze)):
        raise ValueError(f"{both} are in requires_grad and in frozen_params: leave one out")
    if isinstance(class_weight, str):
        raise ValueError("class_weight='balanced' needs labels: pass the weights of the classes")
    trainer = Trainer(
        at_opset(read(model), opset),
        chosen,
        optimizer="sgd" if optimizer is None else select_optimizer(optimizer),
        learning_rate=_rate(learning_rate),
        train=train,
        freeze=freeze,
        clip_norm=clip_norm,
        batch_norm=batch_norm,
        dropout=dropout,
        class_weight=class_weight,
        loss_options=options,
        loss_weights=loss_weights,
        seed=seed,
    )
    setup = Setup(trainer, Dataset(None, None, np.ones(1) if sample_weight else None), None)
    additional = _names(additional_output_names) or []
    with garbage_kept():
        models = build_models(setup, additional, optimizer is not None)
    _warn(models)
    digest = trainer.digest or described(trainer.proto)
    manifest = manifest_of(models, float(learning_rate), digest, prefix, ort_format)
    files = {**models.by_key, "model": trainer.model}
    files = {key: with_ir_version(proto, ir_version) for key, proto in files.items()}
    own = tuple(f"{prefix}{Path(name).stem}." for name in (*FILES.values(), MANIFEST))
    with added_to(os.curdir if artifact_directory is None else artifact_directory, own) as folder:
        _write(folder, files, models, manifest, prefix)
    return manifest


def _write(
    folder: Path,
    files: Mapping[str, ModelProto],
    models: Models,
    manifest: Manifest,
    prefix: str,
) -> None:
    """Write all files into a new folder."""
    for key, proto in files.items():
        save(proto, folder / manifest["files"][key])
    for key, name in manifest.get("ort_files", {}).items():
        write_ort(folder / manifest["files"][key], folder / name)
    arrays = models.weights | models.slots | models.buffers
    metadata = {"format": CHECKPOINT, "model": manifest["digest"]}
    content = serialized(arrays, metadata)
    (folder / manifest["files"]["checkpoint"]).write_bytes(content)
    text = json.dumps(manifest, indent=1)
    (folder / f"{prefix}{MANIFEST}").write_text(text, encoding="utf-8")


def _names(names: str | Iterable[str] | None) -> list[str] | None:
    return None if names is None else as_list(names)


def _rate(rate: Any) -> float:
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not rate > 0:
        raise ValueError(
            f"learning_rate must be a number above 0, not {rate!r}: a client passes the rate of "
            "every step, and so computes schedules"
        )
    return float(rate)


def _check_prefix(prefix: str) -> None:
    """Raise `ValueError` for a prefix with which a name is no plain name of a file."""
    if not prefix.isprintable() or set(prefix) & set("/\\"):
        raise ValueError(f"prefix={prefix!r} begins names of files: use no '/' and no '\\'")


def _warn(models: Models) -> None:
    if models.unreached:
        warnings.warn(
            f"the loss does not depend on {models.unreached}: they do not train", stacklevel=3
        )
    if models.rounding:
        warnings.warn(straight_through_warning(models.rounding), stacklevel=3)
