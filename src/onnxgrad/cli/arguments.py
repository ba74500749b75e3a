"""The arguments of a `Trainer` from the options of the command line."""

from __future__ import annotations

import inspect
import json
from typing import Any

from onnxgrad.checks import check_number
from onnxgrad.cli.command_options import LossOptions, OptimizerOptions, RunOptions, TrainOptions
from onnxgrad.errors import check_options, unknown
from onnxgrad.optimizers.base import Optimizer
from onnxgrad.optimizers.presets import OPTIMIZERS, WHOLE_TENSORS
from onnxgrad.parallel.process_groups import DataParallel, find_process_group
from onnxgrad.schedules import compose
from onnxgrad.schedules.base import Schedule
from onnxgrad.schedules.curves import SCHEDULES
from onnxgrad.training.job import usual_rate
from onnxgrad.training.trainer import Trainer


def trainer_arguments(options: TrainOptions) -> dict[str, Any]:
    """Return the `Trainer` arguments that options set, except model, loss and class names.

    Options with the name of an argument are passed as they are, but for those set here.
    """
    metrics = loss_arguments(options)["metrics"]
    balanced = "balanced" in options.class_weight
    stated = [text for text in options.class_weight if text != "balanced"]
    weights = read_numbers("class-weight", stated)
    if weights and balanced:
        raise ValueError(
            "--class-weight balanced computes the weights of all classes: leave out --class-weight "
            f"{stated[0]}"
        )
    passed = inspect.signature(Trainer).parameters.keys() - {"model", "loss", "classes", "metrics"}
    return {
        **{name: value for name, value in vars(options).items() if name in passed},
        **({"metrics": metrics} if metrics else {}),
        "optimizer": optimizer(options),
        "learning_rate": learning_rate(options),
        "train": options.train or None,
        "dropout": read_numbers("dropout", options.dropout),
        "class_weight": "balanced" if balanced else weights,
        "parallel": _parallel_argument(options),
    }


def _parallel_argument(options: RunOptions) -> DataParallel | None:
    """Return the `DataParallel` options; None if the user sets none of them."""
    chosen = {name: getattr(options, name) for name in ("sync_batch_norm", "shard_optimizer")}
    given = next((name for name, value in chosen.items() if value), None)
    if given is None:
        return None
    if find_process_group(None) is None:
        raise ValueError(
            f"--{given.replace('_', '-')} is for several processes, and only one runs: start "
            "several by torchrun --nproc-per-node 4 -m onnxgrad train, or by mpirun -n 4 onnxgrad "
            "train"
        )
    return DataParallel(**chosen)


def loss_arguments(options: LossOptions) -> dict[str, Any]:
    """Return `loss`, `loss_options`, `loss_weights` and `metrics` of a `Trainer`, from options."""
    by_output = dict(map(_split_output_name, options.loss))
    if by_output and options.loss_output != LossOptions.loss_output:
        raise ValueError(
            f"--loss-output {options.loss_output} names a loss that the model computes, and has no "
            "effect beside --loss: leave out --loss-output or --loss"
        )
    metrics: dict[Any, list[str]] = {}
    for text in (part for each in options.metrics for part in each.split(",") if part):
        output, name = _split_output_name(text)
        metrics.setdefault(output, []).append(name)
    if None in by_output and len(by_output) > 1:
        raise ValueError("one --loss names an output and another none: write each as OUTPUT=LOSS")
    loss: Any = by_output
    if not by_output or None in by_output:
        loss = by_output.get(None)
        if loss is not None and options.output_index is not None:
            loss = {options.output_index: loss}
    elif options.output_index is not None:
        raise ValueError(
            "--output-index and --loss OUTPUT=LOSS both name outputs: leave out --output-index"
        )
    chosen: Any = read_options(options, "loss_option")
    if isinstance(loss, dict) and chosen:
        if len(loss) > 1:
            raise ValueError(
                "--loss-option is for one loss, and there are several: leave out --loss-option"
            )
        chosen = dict.fromkeys(loss, chosen)
    return {
        "loss": loss,
        "loss_options": chosen or None,
        "loss_weights": read_numbers("loss-weight", options.loss_weight),
        "metrics": metrics.get(None, []) if set(metrics) <= {None} else metrics,
    }


def _split_output_name(text: str) -> tuple[str | None, str]:
    """Return (output, name) from the text "OUTPUT=NAME", or (None, name) from "NAME"."""
    output, equals, name = text.rpartition("=")
    return (output if equals else None), name


def optimizer(options: OptimizerOptions) -> Optimizer:
    """Return the optimizer that `--optimizer` and `--optimizer-option` name."""
    chosen = read_options(options, "optimizer_option")
    if options.weight_decay is not None:
        chosen["weight_decay"] = options.weight_decay
    return _build_preset("optimizer", options.optimizer, OPTIMIZERS | WHOLE_TENSORS, (), chosen)


def learning_rate(options: OptimizerOptions) -> Schedule:
    """Return the learning-rate schedule: `--warmup`, then `--schedule`."""
    name, rate, warmup = options.schedule, options.learning_rate, options.warmup
    if rate is not None:
        check_number("learning_rate", rate)
    else:
        rate = usual_rate(optimizer(options))
    steps = int(warmup) if warmup is not None and warmup >= 1 else warmup
    if steps is not None and steps >= 1 and steps != warmup:
        raise ValueError(
            f"--warmup {warmup} is neither a whole number of steps, such as 100, nor a share of "
            "the steps below 1, such as 0.1"
        )
    chosen, own = read_options(options, "schedule_option"), name in ("cosine", "inverse_sqrt")
    if own and steps:
        chosen["warmup"] = steps
    schedule = _build_preset("schedule", name, SCHEDULES, (rate,), chosen)
    return schedule if own or not steps else compose.warmup(schedule, steps)


def _build_preset(
    kind: str, name: str, presets: dict[str, Any], first: tuple[Any, ...], chosen: dict[str, Any]
) -> Any:
    """Return the optimizer or schedule that `--optimizer` or `--schedule` names.

    Raises:
        ValueError: an unknown preset, or options that it does not take; the message names the
            option of the shell.
    """
    if name not in presets:
        raise unknown(kind, name, presets)
    preset, what = presets[name], f"--{kind} {name}"
    check_options(f"option of {kind} {name!r}", chosen, preset, skip=len(first))
    others = [*inspect.signature(preset).parameters.values()][len(first) :]
    missing = [p.name for p in others if p.default is p.empty and p.name not in chosen]
    if missing:
        needed = " ".join(f"--{kind}-option {each}=VALUE" for each in missing)
        raise ValueError(f"{what} needs {needed}")
    try:
        return preset(*first, **chosen)
    except (TypeError, ValueError) as e:
        raise ValueError(f"{what}: {e}; see --{kind}-option") from None


def read_options(options: Any, name: str) -> dict[str, Any]:
    """Return `{name: value}` of an option NAME=VALUE; a value that is no JSON is a text."""
    found: dict[str, Any] = {}
    for text in getattr(options, name):
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ValueError(f"--{name.replace('_', '-')} {text!r} is not NAME=VALUE")
        try:
            found[key] = json.loads(value)
        except (ValueError, RecursionError):
            found[key] = value
    return found


def read_numbers(option: str, texts: list[str]) -> dict[str, float] | None:
    """Return `{name: number}` of options `NAME=NUMBER`, where a name may contain "="."""
    found = {}
    for text in texts:
        name, equals, value = text.rpartition("=")
        try:
            found[name] = float(value)
        except ValueError:
            equals = ""
        if not equals:
            raise ValueError(f"--{option} {text!r} is not NAME=NUMBER")
    return found or None
