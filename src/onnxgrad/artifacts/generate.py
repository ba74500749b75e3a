"""`generate_artifacts`: write the files with which a device trains a model."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from onnxgrad.artifacts.folder import FILES, MANIFEST, Manifest, build_manifest, write_all_or_none
from onnxgrad.artifacts.models import Models, build_models
from onnxgrad.artifacts.versions import convert_to_opset, set_ir_version
from onnxgrad.autodiff.straight_through import straight_through_warning
from onnxgrad.checks import check_choice
from onnxgrad.errors import printable, unknown
from onnxgrad.garbage import pause_garbage_collection
from onnxgrad.losses.formulas import LOSSES, loss_spec
from onnxgrad.losses.spec import ALIASES
from onnxgrad.model.read import ModelLike, read
from onnxgrad.model.write import external_data_files, save
from onnxgrad.optimizers.adaptive import ScaleByAdamEpsHat
from onnxgrad.optimizers.base import Chain, Optimizer
from onnxgrad.optimizers.presets import select, sgd
from onnxgrad.optimizers.scaling import ScaleByLearningRate
from onnxgrad.runtime.device import CPU
from onnxgrad.schedules.base import Schedule
from onnxgrad.training.array_files import serialize_arrays
from onnxgrad.training.data import Dataset
from onnxgrad.training.equality import describe
from onnxgrad.training.parameters.choice import list_patterns
from onnxgrad.training.recipe import Recipe
from onnxgrad.training.trainer import Trainer

CHECKPOINT = "onnxgrad.artifacts.1"  # value of "format" in the metadata of a checkpoint
LARGEST_ORT = 1 << 31  # bytes: offsets in a .ort file have 31 bits
OPTIONS = (  # arguments of `Trainer` that `generate_artifacts` takes, too
    *("batch_norm", "class_weight", "clip_norm", "dropout", "learning_rate", "loss_options"),
    *("loss_weights", "seed"),
)


def generate_artifacts(
    model: ModelLike,
    requires_grad: Iterable[str] | None = None,
    frozen_params: Iterable[str] | None = None,
    loss: Any = None,
    optimizer: str | Optimizer | None = None,
    artifact_directory: str | os.PathLike | None = None,
    prefix: str = "",
    *,
    additional_output_names: Iterable[str] = (),
    sample_weight: bool | str = False,
    opset: int | None = None,
    ir_version: int | None = None,
    ort_format: bool = False,
    **options: Any,
) -> Manifest:
    """Write files with which any onnxruntime trains a model like `Trainer`; return the manifest.

    Args:
        model: model, serialized model or path; never modified.
        requires_grad: names and patterns of tensors that train; None: weights by their role.
        frozen_params: names and patterns of tensors that do not train.
        loss: of a `Trainer`; or "MSELoss", "CrossEntropyLoss", "BCEWithLogitsLoss", "L1Loss".
        optimizer: of a `Trainer`; or "AdamW" or "SGD" of onnxruntime-training: "AdamW" has no
            weight decay and an eps of 1e-6. None: neither step.onnx nor optimizer_model.onnx.
        artifact_directory: the folder, which is created; None: the current one.
        prefix: prefix of the names of all files.
        additional_output_names: tensors that eval_model.onnx returns beside the predictions.
        sample_weight: whether a batch has an input of sample weights, (N,); "element": one weight
            for each loss, with as many axes, which is broadcast to their shape.
        opset: the newest opset in all files, such as 19 for onnxruntime 1.16; None: the model's.
        ir_version: the IR version of all files, such as 9; None: the lowest that fits.
        ort_format: also write the models as `.ort`.
        options: learning_rate (a number, the default of clients), batch_norm, class_weight,
            clip_norm, dropout, loss_options, loss_weights and seed, as in `Trainer`.

    Raises:
        ValueError: invalid arguments, or names that the files need for something else.
        ModelError: the model cannot be read, or not be converted to that opset.
        NoGradientRule: an operator between the weights and the loss has no rule.
        OSError: the folder cannot be written; it stays as it was, as after any error.

    Examples:
        >>> import tempfile, onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''<ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,2] x) => (float[N,2] y) <float[2] w = {2.0, 3.0}> { y = Mul(x, w) }''')
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     manifest = og.artifacts.generate_artifacts(
        ...         model, ["w"], None, "MSELoss", "AdamW", folder)
        >>> [slot["name"] for slot in manifest["slots"]]
        ['w.m', 'w.v']
    """
    if not prefix.isprintable() or set(prefix) & set("/\\"):
        raise ValueError(f"prefix={prefix!r} is the start of file names: use no '/' and no '\\'")
    if sample_weight not in (False, True, "element"):
        raise unknown("sample_weight", sample_weight, ["False", "True", "element"])
    proto = convert_to_opset(read(model), opset)
    train = None if requires_grad is None else list_patterns(requires_grad)
    freeze = list_patterns(frozen_params or ())
    for name in options:
        check_choice("option of generate_artifacts", name, OPTIONS)
    if both := sorted(set(train or ()) & set(freeze)):
        raise ValueError(
            f"{both} are in requires_grad and in frozen_params: name each in one of the two"
        )
    weight = options.get("class_weight")
    each = [*weight.values()] if isinstance(weight, Mapping) else [weight]
    if any(isinstance(one, str) for one in each):
        raise ValueError(
            "class_weight='balanced' needs labels, which artifacts lack: pass the weights of the "
            "classes"
        )
    chosen, own = select_loss(loss, options.pop("loss_options", None))
    rate = options.pop("learning_rate", 1e-3)
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not rate > 0:
        raise ValueError(
            f"learning_rate must be a number above 0, not {rate!r}: the program that trains "
            "passes the rate of every step, and computes schedules"
        )
    options |= {"loss_options": own, "learning_rate": float(rate)}
    updated = "sgd" if optimizer is None else select_optimizer(optimizer)
    trainer = Trainer(proto, chosen, optimizer=updated, train=train, freeze=freeze, **options)
    files = _ArtifactFiles(prefix, optimizer is not None, sample_weight, ir_version, ort_format)
    models = files.build_models(trainer, list_patterns(additional_output_names))
    return files.write(artifact_directory, trainer, models)


@dataclass(frozen=True)
class _ArtifactFiles:
    """The arguments of `generate_artifacts` that say which files to write, by the same names."""

    prefix: str
    updates: bool
    sample_weight: bool | str
    ir_version: int | None
    ort_format: bool

    def build_models(self, trainer: Trainer, additional: list[str]) -> Models:
        """Return the ONNX models of a trainer's artifacts; warn of weights that do not train."""
        shape = (1, 2) if self.sample_weight == "element" else (1,)
        weight = np.ones(shape) if self.sample_weight else None
        recipe = Recipe.for_data(trainer._job, trainer.state, Dataset(None, None, weight))
        with pause_garbage_collection():
            models = build_models(recipe, additional, self.updates)
        if models.unreached:
            warnings.warn(
                f"the loss does not depend on {models.unreached}: they do not train", stacklevel=3
            )
        if models.rounding:
            warnings.warn(straight_through_warning(models.rounding), stacklevel=3)
        return models

    def write(self, folder: str | os.PathLike | None, trainer: Trainer, models: Models) -> Manifest:
        """Write all files of the artifacts, or none after an error; return the manifest."""
        job = trainer._job
        digest, rate = job.digest or describe(job.proto), job.learning_rate
        assert isinstance(rate, Schedule)
        default = rate.rate(0, {})
        manifest = build_manifest(models, default, digest, self.prefix, self.ort_format)
        protos = {**models.by_key, "model": trainer.model}
        protos = {key: set_ir_version(p, self.ir_version) for key, p in protos.items()}
        stems = (Path(name).stem for name in (*FILES.values(), MANIFEST))
        own = tuple(f"{self.prefix}{stem}." for stem in stems)
        with write_all_or_none(os.curdir if folder is None else folder, own) as new:
            files = {key: new / name for key, name in manifest["files"].items()}
            for key, proto in protos.items():
                save(proto, files[key])
            for key, name in manifest.get("ort_files", {}).items():
                write_ort(files[key], new / name)
            arrays = models.weights | models.slots | models.buffers
            metadata = {"format": CHECKPOINT, "model": digest}
            with files["checkpoint"].open("wb") as file:
                file.writelines(serialize_arrays(arrays, metadata))
            text = json.dumps(manifest, indent=1)
            (new / f"{self.prefix}{MANIFEST}").write_text(text, encoding="utf-8")
        return manifest


def write_ort(model: Path, path: Path) -> None:
    """Convert a model file to the format `.ort`, which onnxruntime builds for small devices read.

    onnxruntime's basic optimizations alone are applied: they fit all processors, and write standard
    operators.

    Raises:
        ValueError: the model is too large for the format.
    """
    size = sum(file.stat().st_size for file in {model, *external_data_files(model)})
    if size >= LARGEST_ORT:
        file = printable(model.name)
        raise ValueError(f"{file} has {size} bytes, too many for .ort: pass ort_format=False")
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = os.fspath(path)
    options.add_session_config_entry("session.save_model_format", "ORT")
    options.log_severity_level = 4
    ort.InferenceSession(os.fspath(model), options, providers=CPU.providers)


# {name in onnxruntime.training: (loss, its options)}
FORMER_LOSSES: dict[str, tuple[str, dict[str, Any]]] = {
    "MSELoss": ("squared_error", {}),
    "CrossEntropyLoss": ("cross_entropy", {"from_logits": True}),
    "BCEWithLogitsLoss": ("binary_cross_entropy", {"from_logits": True}),
    "L1Loss": ("absolute_error", {}),
}
# with the defaults of onnxruntime.training.artifacts, which differ from those of onnxgrad
FORMER_OPTIMIZERS: dict[str, Optimizer] = {
    "AdamW": Chain((ScaleByAdamEpsHat(eps=1e-6), ScaleByLearningRate())),
    "SGD": sgd(),
}


def select_loss(
    loss: Any, options: Mapping[str, Any] | None
) -> tuple[Any, Mapping[str, Any] | None]:
    """Return (loss, options) for `Trainer`; the loss may have a name of onnxruntime.training.

    Raises:
        ValueError: an unknown name.
    """
    if isinstance(loss, Mapping):
        return {output: _select_output_loss(own) for output, own in loss.items()}, options
    if not isinstance(loss, str) or loss.endswith(".onnx"):
        return loss, options
    if loss in FORMER_LOSSES:
        name, own = FORMER_LOSSES[loss]
        return name, {**own, **(options or {})}
    if loss not in LOSSES and loss not in ALIASES:
        raise unknown("loss", loss, [*FORMER_LOSSES, *LOSSES])
    return loss, options


def _select_output_loss(loss: Any) -> Any:
    """Return the loss of one output for `Trainer`; it may have a name of onnxruntime.training."""
    if not isinstance(loss, str) or loss not in FORMER_LOSSES:
        return loss
    name, options = FORMER_LOSSES[loss]
    return loss_spec(name, None, options)


def select_optimizer(optimizer: str | Optimizer) -> Optimizer:
    """Return the `Optimizer` that is given or named, also by a name of onnxruntime.training.

    Raises:
        ValueError: an unknown name, or an optimizer that averages weights.
    """
    if isinstance(optimizer, str) and optimizer in FORMER_OPTIMIZERS:
        return FORMER_OPTIMIZERS[optimizer]
    chosen = select(optimizer)
    if chosen.averages:
        raise ValueError(
            f"{chosen!r} evaluates averages of weights, which artifacts do not compute: pass it "
            "without averages, or train with Trainer"
        )
    return chosen
