"""Where a trained model goes: to a file, or for a language model to a folder like its own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path

from onnx import ModelProto

from onnxgrad.cli.model_files import STDOUT, check_not_data, check_output
from onnxgrad.language.folders import ModelFolder, adapter_file
from onnxgrad.language.save import check_folder, save_folder
from onnxgrad.model.files import check_writable
from onnxgrad.model.write import save


@dataclass(frozen=True)
class Output:
    """The result that `--output` names: a file, or a folder like the folder of the model."""

    like: ModelFolder | None
    adapter: str | None = None

    @property
    def default(self) -> str:
        """What is written without `--output`."""
        return "trained.onnx" if self.like is None else "trained"

    def unused_default(self, curves: bool) -> str:
        """Return the default path, with a number where it or its curves would replace a file."""
        default = Path(self.default)
        numbered = (default.with_stem(f"{default.stem}-{number}") for number in count(2))
        for path in chain([default], numbered):
            if not path.exists() and not (curves and self.curves(path).exists()):
                break
        return str(path)

    def check(self, path: str, overwrite: bool, inputs: Iterable[Path], json: bool) -> None:
        """Raise if a model cannot be written, before anything is computed."""
        if self.adapter is not None:
            adapter_file(Path(), self.adapter)
        if self.like is None and self.adapter is not None:
            raise ValueError(
                "--adapter writes into a folder, and MODEL is a file: `onnxgrad.save_adapter` and "
                "`onnxgrad.graph.adapter_inputs` write its adapter and its base"
            )
        if self.like is None:
            check_output(path, overwrite, inputs, json)
        elif path == STDOUT:
            raise ValueError("--output - is standard output, and the result is a folder: name one")
        else:
            check_folder(path, overwrite, self.like)

    def check_data(self, path: str, overwrite: bool, model: str, proto: ModelProto) -> None:
        """Raise if data that the model reads would be replaced."""
        if self.like is not None:
            check_folder(path, overwrite, self.like, proto)
        else:
            check_not_data(path, model)

    def curves(self, path: Path) -> Path:
        """Return the file of the loss curves beside a model."""
        return path.with_suffix(".png") if self.like is None else Path(f"{path}.png")

    def save(self, model: ModelProto, path: Path, overwrite: bool) -> None:
        """Write the model."""
        if self.like is not None:
            save_folder(model, path, self.like, adapter=self.adapter, overwrite=overwrite)
            return
        check_writable(path, overwrite)  # it may have been created during training
        save(model, path)
