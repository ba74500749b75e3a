"""Options as the arguments of a `Trainer`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from onnxgrad.checks import check_number
from onnxgrad.cli.schedule_names import SCHEDULES
from onnxgrad.cli.train_options import (
    LossOptions,
    OptimizerOptions,
    RunOptions,
    TrainOptions,
)
from onnxgrad.errors import check_options, unknown
from onnxgrad.optimizers.base import Optimizer
from onnxgrad.optimizers.presets import OPTIMIZERS, WHOLE_TENSORS
from onnxgrad.parallel.process_groups import DataParallel, group_of
from onnxgrad.schedules import compose
from onnxgrad.schedules.base import Schedule
from onnxgrad.training.job import usual_rate


def trainer_arguments(options: TrainOptions) -> dict[str, Any]:
    """Return the arguments that need neither the model nor the data."""
    balanced = "balanced" in options.class_weight
    stated = [text for text in options.class_weight if text != "balanced"]
    weights = dict(read_number("class-weight", text) for text in stated)
    if weights and balanced:
        raise ValueError("--class-weight balanced computes all weights: leave out the others")
    return {
        **loss_arguments(options),
        "optimizer": optimizer(options),
        "learning_rate": learning_rate(options),
        "train": options.train or None,
        "freeze": options.freeze,
        "train_ranges": options.train_ranges,
        "clip_norm": options.clip_norm,
        "accumulate": options.accumulate,
        "batch_norm": options.batch_norm,
        "dropout": dict(read_number("dropout", text) for text in options.dropout) or None,
        "class_weight": "balanced" if balanced else weights or None,
        "recompute": options.recompute,
        "precision": options.precision,
        "device": options.device,
        "parallel": _parallel_argument(options),
        "seed": options.seed,
    }


def _parallel_argument(options: RunOptions) -> DataParallel | None:
    """Return how several processes train together; None: by default, if there are several."""
    chosen = {name: getattr(options, name) for name in ("sync_batch_norm", "shard_optimizer")}
    given = next((name for name, value in chosen.items() if value), None)
    if given is None:
        return None
    if group_of(None) is None:
        raise ValueError(
            f"--{given.replace('_', '-')} is for several processes, and there is one: start them "
            "by torchrun --nproc-per-node 4 -m onnxgrad train, or mpirun -n 4 onnxgrad train"
        )
    return DataParallel(**chosen)


def loss_arguments(options: LossOptions) -> dict[str, Any]:
    """Return the loss, its options and weights, and the metrics."""
    by_output = dict(map(_by_output, options.loss))
    if by_output and options.loss_output != LossOptions.loss_output:
        raise ValueError(
            f"--loss-output {options.loss_output} names a loss that the model computes, and has no "
            "effect beside --loss: leave out one of them"
        )
    metrics: dict[Any, list[str]] = {}
    for text in (part for each in options.metrics for part in each.split(",") if part):
        output, name = _by_output(text)
        metrics.setdefault(output, []).append(name)
    if None in by_output and len(by_output) > 1:
        raise ValueError("--loss names outputs and is there without one: write OUTPUT=LOSS")
    loss: Any = by_output
    if not by_output or None in by_output:
        loss = by_output.get(None)
        if loss is not None and options.output_index is not None:
            loss = {options.output_index: loss}
    elif options.output_index is not None:
        raise ValueError("--output-index and OUTPUT=LOSS both name outputs: leave it out")
    chosen = dict(read_value("loss-option", text) for text in options.loss_option)
    if isinstance(loss, dict) and chosen:
        if len(loss) > 1:
            raise ValueError("--loss-option is for one loss, and there are several: leave it out")
        chosen = dict.fromkeys(loss, chosen)
    return {
        "loss": loss,
        "loss_options": chosen or None,
        "loss_weights": dict(read_number("loss-weight", text) for text in options.loss_weight)
        or None,
        "metrics": metrics.get(None, []) if set(metrics) <= {None} else metrics,
    }


def _by_output(text: str) -> tuple[str | None, str]:
    output, equals, name = text.rpartition("=")
    return (output if equals else None), name


def optimizer(options: OptimizerOptions) -> Optimizer:
    """Return the optimizer."""
    names = OPTIMIZERS | WHOLE_TENSORS
    if options.optimizer not in names:
        raise unknown("optimizer", options.optimizer, names)
    preset = names[options.optimizer]
    chosen = dict(read_value("optimizer-option", text) for text in options.optimizer_option)
    if options.weight_decay is not None:
        chosen["weight_decay"] = options.weight_decay
    check_options(f"option of optimizer {options.optimizer!r}", chosen, preset)
    return _call_preset(f"--optimizer {options.optimizer}", preset, (), chosen)


def learning_rate(options: OptimizerOptions) -> Schedule:
    """Return the learning rate by step: `--warmup`, and then `--schedule`."""
    name, rate, warmup = options.schedule, options.learning_rate, options.warmup
    if name not in SCHEDULES:
        raise unknown("schedule", name, SCHEDULES)
    if rate is not None:
        check_number("learning_rate", rate)
    else:
        rate = usual_rate(optimizer(options))
    chosen = dict(read_value("schedule-option", text) for text in options.schedule_option)
    check_options(f"option of schedule {name!r}", chosen, SCHEDULES[name], skip=1)
    steps = int(warmup) if warmup is not None and warmup >= 1 else warmup
    if steps is not None and steps >= 1 and steps != warmup:
        raise ValueError(f"--warmup {warmup} is neither a number of steps nor a share below 1")
    own = name in ("cosine", "inverse_sqrt")
    if own and steps:
        chosen["warmup"] = steps
    schedule = _call_preset(f"--schedule {name}", SCHEDULES[name], (rate,), chosen)
    return schedule if own or not steps else compose.warmup(schedule, steps)


def _call_preset(
    what: str, function: Callable[..., Any], first: Sequence[Any], chosen: dict
) -> Any:
    """Return the result of a preset; errors of its arguments name the option."""
    try:
        return function(*first, **chosen)
    except TypeError as e:
        reason, option = str(e), f"{what.split()[0]}-option"
        if "missing" in reason and (names := re.findall(r"'(\w+)'", reason)):
            needed = " ".join(f"{option} {name}=VALUE" for name in names)
            raise ValueError(f"{what} needs {needed}") from None
        reason = reason.removeprefix(f"{function.__name__}() ")
        raise ValueError(f"{what}: {reason}; see {option}") from None
    except ValueError as e:
        raise ValueError(f"{what}: {e}") from None


def read_value(option: str, text: str) -> tuple[str, Any]:
    """Return the name and the value of `NAME=VALUE`, a text unless it is JSON."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError(f"--{option} {text!r} is not NAME=VALUE")
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        return name, value


def read_number(option: str, text: str) -> tuple[str, float]:
    """Return the name and the number of `NAME=NUMBER`; the name may contain "="."""
    name, equals, value = text.rpartition("=")
    try:
        if not equals:
            raise ValueError
        return name, float(value)
    except ValueError:
        raise ValueError(f"--{option} {text!r} is not NAME=NUMBER") from None
