"""`save_adapter` and `load_adapter`: adapters in files of PEFT and of onnxruntime."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnx import ModelProto

from onnxgrad.adapters import peft_files, session_files
from onnxgrad.adapters.insertion import adopt_adapters
from onnxgrad.errors import escaping, named
from onnxgrad.model.notes import HEAD, read_adapters, read_metadata
from onnxgrad.model.read import ModelLike
from onnxgrad.training.parameters.choice import matching_weights

if TYPE_CHECKING:
    from onnxgrad.training.trainer import Trainer


@escaping()
def save_adapter(
    model: ModelLike | Trainer, path: str | os.PathLike, weights: str | Iterable[str] = ()
) -> None:
    """Save the adapters of `model`, and the weights of its new head, to a folder or a file.

    A folder is in the form of PEFT: `adapter_model.safetensors` with the keys and shapes of PEFT,
    `base_model.model.<module>.lora_A.weight`, and `adapter_config.json`. PEFT loads it into the
    PyTorch model whose modules have these paths; a path is the name of the weight without
    ".weight", or the path that the exporter recorded for a weight that it renamed.

    A path that ends in ".onnx_adapter" is the file that sessions of onnxruntime and
    onnxruntime-genai take for the base of `adapter_inputs`. It has the tensors as the model does,
    but for B, which is multiplied by alpha / rank.

    Args:
        model: model with adapters, serialized model or path; or a trainer, whose trained tensors
            are all written.
        path: folder, created if missing; the two files in it are replaced. A path that ends in
            ".safetensors" is one file, with the settings in its metadata.
        weights: names and patterns of other tensors to write, such as "*norm*".

    Raises:
        ValueError: `model` has no adapters; adapters with `use_dora` in an ".onnx_adapter" file.
        ModelError: `model` cannot be read, or another tool modified the adapters.
        OSError: the folder or file is not writable.

    Examples:
        >>> import tempfile, onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]> f (float[N,1] x) => (float[N,2] y)
        ...     <float[1,2] fc = {1.0, 2.0}> { y = MatMul(x, fc) }''')
        >>> adapted = og.add_lora(model, "fc", rank=1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     og.save_adapter(adapted, folder)
        ...     og.load_adapter(model, folder) == adapted
        True
    """
    target = Path(path)
    proto, notes, others = _adapters_and_tensors_to_save(model, weights)
    if target.suffix == session_files.SUFFIX and not target.is_dir():
        return session_files.write_adapter_file(proto, notes, others, target)
    if not notes:
        raise ValueError(f"the model has no adapters to save: add some by {named('add_lora')}")
    peft_files.write_adapters(proto, notes, others, target)


def _adapters_and_tensors_to_save(
    model: ModelLike | Trainer, weights: str | Iterable[str]
) -> tuple[ModelProto, list[dict[str, Any]], list[str]]:
    """Return the model as a proto, the dicts that describe its adapters, and the names of other
    tensors to save.
    """
    from onnxgrad.training.trainer import Trainer

    trained = model.trained if isinstance(model, Trainer) else []
    proto, _ = adopt_adapters(model.model if isinstance(model, Trainer) else model)
    notes = read_adapters(proto)
    own = {name for note in notes for name in note["tensors"]}
    others = [*read_metadata(proto, HEAD), *trained]
    if weights:
        others += matching_weights(proto, weights, "weight to save (weights=)")
    return proto, notes, [name for name in dict.fromkeys(others) if name not in own]


@escaping()
def load_adapter(model: ModelLike, path: str | os.PathLike) -> ModelProto:
    """Return `model` with adapters loaded from a folder or file that `save_adapter` or PEFT wrote.

    Adapters of `model` get the values of the file; a model without any gets adapters beside the
    weights of the modules that the file names. The tensors of a new head, which the file has as
    "modules_to_save", are replaced.

    Args:
        model: the model that was adapted, or one with its adapters; never modified.
        path: folder with `adapter_model.safetensors` and `adapter_config.json`; or the one file
            that `save_adapter` wrote, ".onnx_adapter" of any tool too. As that does not state
            alpha, adapters of a model without any get alpha = rank.

    Raises:
        FileNotFoundError: there are no adapters.
        ValueError: adapters of another kind than LoRA; a module that the model does not have, or a
            tensor of another shape.
        ModelError: `model` cannot be read.

    Examples:
        >>> import tempfile, onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]> f (float[N,1] x) => (float[N,2] y)
        ...     <float[1,2] fc = {1.0, 2.0}> { y = MatMul(x, fc) }''')
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     og.save_adapter(og.add_lora(model, "fc", rank=1), folder)
        ...     print(og.trainable(og.load_adapter(model, folder)).trained)
        name              shape   dtype    trains  why
        fc.lora_A.weight  [1, 1]  float32  yes     an adapter
        fc.lora_B.weight  [1, 2]  float32  yes     an adapter
        2 of 2 float constants train: 3 of 3 numbers
    """
    source = Path(path)
    if source.suffix == session_files.SUFFIX and not source.is_dir():
        return session_files.load_adapter_file(model, source)
    return peft_files.load_adapters(model, source)
