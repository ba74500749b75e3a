"""Networks of PyTorch and scikit-learn as models: exported once for each code and version.

Exporting takes longer than most tests. Models are kept in a folder of pytest's cache, by everything
that decides what an export gives: modules, their source, weights, examples, options, versions.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import io
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import onnx

from tests.support.paths import ROOT

CACHE = ROOT / ".pytest_cache" / "exports"
PACKAGES = ("torch", "onnx", "onnxscript", "onnx-ir", "transformers", "numpy")


def export_module(
    module: Any,
    examples: Sequence[Any],
    *,
    dynamo: bool = False,
    train: bool = False,
    **options: Any,
) -> onnx.ModelProto:
    """Return the model of a PyTorch module in inference form, or with `train` in training form.

    `options` are those of `torch.onnx.export`.
    """
    import torch

    module.train(train)
    if train and not dynamo:
        options.setdefault("training", torch.onnx.TrainingMode.TRAINING)

    def write_model() -> bytes:
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        logging.getLogger("onnxscript").setLevel(logging.ERROR)
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if dynamo:
                program = torch.onnx.export(
                    module, tuple(examples), dynamo=True, verbose=False, **options
                )
                return program.model_proto.SerializeToString()
            file = io.BytesIO()
            torch.onnx.export(module, tuple(examples), file, dynamo=False, **options)
            return file.getvalue()

    key = (_content_of_module(module), _content(examples), dynamo, train, _content(options))
    return onnx.load_model_from_string(cached_bytes(key, write_model))


def cached_bytes(key: object, make: Callable[[], bytes]) -> bytes:
    """Return what `make` returned first for this key, these versions and this Python."""
    versions = [sys.version, *(_installed_version(name) for name in PACKAGES)]
    digest = hashlib.sha256(repr((key, versions, Path(__file__).read_text())).encode())
    path = CACHE / digest.hexdigest()
    if not path.exists():
        content = make()
        CACHE.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        partial.write_bytes(content)
        partial.replace(path)  # other workers see all of it or nothing
    return path.read_bytes()


def _installed_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _content_of_module(module: Any) -> tuple:
    """Return what decides the export of a module: its layers, their source files, its state."""
    sources = {inspect.getsourcefile(type(part)) for part in module.modules()}
    own = sorted(path for path in sources if path and "site-packages" not in path)
    state = {name: _content(value) for name, value in module.state_dict().items()}
    return repr(module), [Path(path).read_text() for path in own], state


def _content(value: Any) -> Any:
    """Return what tells two arguments of an export apart, whatever the process."""
    import torch

    if isinstance(value, dict):
        return [(_content(name), _content(part)) for name, part in value.items()]
    if isinstance(value, list | tuple):
        return [_content(part) for part in value]
    if isinstance(value, torch.Tensor):
        numbers = value.detach().contiguous().view(-1)
        content = numbers.view(torch.uint8).numpy().tobytes() if len(numbers) else b""
        return str(value.dtype), tuple(value.shape), hashlib.sha256(content).hexdigest()
    bounds = [getattr(value, name, None) for name in ("__name__", "min", "max")]  # of a `Dim`
    return re.sub(" at 0x[0-9a-f]+", "", repr(value)), repr(bounds)
