"""`Shell`: messages of the library name options instead of Python's arguments."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection
from typing import Any

from onnxgrad.errors import Face

_FEATURES = "--head N --head-at NAME --head-pool none, or mean, first, image"
_LOSSES = "loss_options."
_JOINED = ("classes", "units")  # names of classes are one value, separated by commas
OPTIONS = {  # the option of an argument, where it has another name
    "units": "head",
    "at": "head_at",
    "pool": "head_pool",
    "mask": "head_mask",
    "rank": "lora_rank",
    "add_lora.dropout": "lora_dropout",
    "loss_options": "loss_option",
    "loss_weights": "loss_weight",
    "budget_seconds": "budget",
    "every_seconds": "checkpoint_seconds",
    "y": "target",
    "size": "image_size",
}
NAMES = {  # functions and other names that are no arguments
    "add_head": _FEATURES,
    "replace_head": "`onnxgrad train --head N`",
    "onnxgrad.replace_head": "`onnxgrad train --head N`",
    "add_lora": "`onnxgrad train --lora PATTERN`",
    "List the weights": "Use --train and --freeze",
    "add_loss_output(..., weight_name='weight')": "--loss NAME",
    "loss={output: loss}": "--loss OUTPUT=LOSS",
    "loss={tensor: loss}": "--loss TENSOR=LOSS",
    "metrics={output: [...]}": "--metrics OUTPUT=METRIC",
    "target={output: column}": "--target OUTPUT=COLUMN",
    "columns={input: [...]}": "--columns INPUT=A,B,...",
    "model": "MODEL",
    "pass inputs={input: output}": "give its inputs the names of the outputs that they take",
    "fit": "training",
    "label": "target",
    "start anew without resume": "name another folder for a new training",
    "onnxgrad.losses.LOSSES": "`onnxgrad train --help`",
}


class Shell(Face):
    """Names arguments as options of the command, or as in Python if there is no such option."""

    first = 1

    def __init__(self, options: Collection[str]) -> None:
        self.options = options

    def named(self, python: str) -> str:
        """Return the option's name for an argument, or other words where there is no option."""
        return NAMES.get(python) or self._option_flag(python) or python

    def given(self, argument: str, *value: Any) -> str:
        """Return an option with its value as users type it; the name if there is no value."""
        option = self._option_flag(argument)
        if option is None or not value:
            return option or super().given(argument, *value)
        given = value[0]
        if argument.startswith(_LOSSES):
            return option + (given if isinstance(given, str) else json.dumps(given))
        if given is None or isinstance(given, bool):
            return f"no {option}" if given is None else option if given else f"--no{option[1:]}"
        if argument in _JOINED and isinstance(given, list):
            given = ",".join(given)
        if isinstance(given, dict):
            given = [f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in given.items()]
        several = given if isinstance(given, (list, tuple)) else [given]
        return " ".join(f"{option} {shlex.quote(str(v))}" for v in several)

    def _option_flag(self, argument: str) -> str | None:
        if argument.startswith(_LOSSES) and "loss_option" in self.options:
            return f"--loss-option {argument.removeprefix(_LOSSES)}="
        name = OPTIONS.get(argument, argument)
        return f"--{name.replace('_', '-')}" if name in self.options else None
