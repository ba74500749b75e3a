"""`onnxgrad losses`: the mathematics and the options of the losses, without a model."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from typing import Any

from onnxgrad.cli.command_options import LossesOptions
from onnxgrad.cli.console import print_json, print_message
from onnxgrad.errors import unknown
from onnxgrad.losses.spec import ALIASES, LEFT_OPEN, LOSSES


def losses(options: LossesOptions) -> None:
    """Print all losses, or the mathematics and the options of one loss."""
    listed = _losses_as_json()
    if options.name:
        listed = [one for one in listed if options.name in one["names"]]
        if not listed:
            raise unknown(
                "loss", options.name, [name for one in _losses_as_json() for name in one["names"]]
            )
    if options.json:
        print_json({"losses": listed})
        return
    for one in listed:
        more = f" ({', '.join(one['names'][1:])})" if one["names"][1:] else ""
        print_message(f"{one['names'][0]}{more}")
        text = one["description"] if options.name else one["mathematics"]
        print_message("\n".join(f"    {line}" if line else "" for line in text.splitlines()))
        for name, value in one["options"].items():
            decided = "  (the model and the labels decide)" if name in one["open"] else ""
            print_message(f"    --loss-option {name}={_option_text(value)}{decided}")
        if options.name:
            print_message(f"    labels: {one['labels']}")


def _option_text(value: Any) -> str:
    """Return the value of a loss option as users type it on the command line."""
    return value if isinstance(value, str) else json.dumps(value)


def _losses_as_json() -> list[dict[str, Any]]:
    """Return the name, aliases, mathematics and options of each loss, as dicts for JSON."""
    found: list[tuple[Any, dict[str, Any]]] = []
    for name, spec in LOSSES.items():
        kind = replace(spec, name="")
        same = next((one for other, one in found if other == kind), None)
        if same is None:
            same = _loss_as_json(spec)
            same["open"] = [n for n in LEFT_OPEN if n in same["options"]]
            same["options"] |= dict.fromkeys(same["open"])
            found.append((kind, same))
        same["names"] += [name, *(alias for alias, loss in ALIASES.items() if loss == name)]
    return [one for _, one in found]


def _loss_as_json(spec: Any) -> dict[str, Any]:
    """Return the mathematics, options, ... of a loss by the documented keys of `losses --json`."""
    text = inspect.cleandoc(spec.formula.__doc__ or "")
    dtype = spec.label_kind.dtype
    labels = "numbers in the shape of the prediction" if dtype is None else f"{dtype.name.lower()}"
    if spec.bounds is not None:
        labels += f", {spec.bounds.text}"
    options = spec.all_options | ({"ignore_nan": False} if spec.may_ignore_nan else {})
    return {
        "names": [],
        "open": [],
        "mathematics": text.splitlines()[0],
        "description": text,
        "options": options,
        "labels": f"{labels}; for {spec.label_kind.needs}",
    }
