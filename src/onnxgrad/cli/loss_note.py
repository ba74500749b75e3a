"""The loss of an earlier training, which the trained model notes for later commands."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from onnx import ModelProto

from onnxgrad.cli.train_options import LossOptions
from onnxgrad.losses.objectives import ALIASES
from onnxgrad.model.notes import read_note
from onnxgrad.training.remembered import LOSS

Options = TypeVar("Options", bound=LossOptions)


def loss_of(proto: ModelProto) -> str | None:
    """Return the name of the only loss of an earlier training; None if it is not known."""
    kept: dict[str, Any] = (read_note(proto, LOSS) or [{}])[0]
    losses = [text.rpartition("=")[2] for text in kept.get("loss", ())]
    return ALIASES.get(losses[0], losses[0]) if len(losses) == 1 else None


def with_loss_of(proto: ModelProto, options: Options) -> tuple[Options, list[str]]:
    """Return options with the loss of an earlier training, unless they or the model say one.

    Returns:
        The options, and a message if the loss is that of the file.
    """
    kept: dict[str, Any] = (read_note(proto, LOSS) or [{}])[0]
    own = any(output.name == options.loss_output for output in proto.graph.output)
    if options.loss or own or not kept:
        return options, []
    known = {name: value for name, value in kept.items() if not getattr(options, name)}
    return replace(options, **known), [f"loss {', '.join(kept['loss'])}, as in its training"]
