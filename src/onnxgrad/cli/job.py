"""What `onnxgrad train` trains: a model that may get a head or adapters, its data, a `Trainer`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import ModelProto

from onnxgrad.cli.arguments import trainer_arguments
from onnxgrad.cli.data_options import LabelOptions
from onnxgrad.cli.image_source import ImageSource, with_parts
from onnxgrad.cli.label_columns import Targets, names_in
from onnxgrad.cli.loss_note import with_loss_of
from onnxgrad.cli.model_with_loss import ModelWithLoss, with_loss
from onnxgrad.cli.sources import TextSource, begin_errors, open_data
from onnxgrad.cli.task import Task, map_arrow, map_images, map_table, map_texts, split
from onnxgrad.cli.train_options import TrainOptions
from onnxgrad.data.class_numbers import weights_by_number
from onnxgrad.data.columns import class_names
from onnxgrad.data.tables import FileTable
from onnxgrad.errors import unknown
from onnxgrad.language.text_readers import Texts
from onnxgrad.model.class_labels import Labels
from onnxgrad.model.notes import CLASSES, write_note
from onnxgrad.runtime.device import Device
from onnxgrad.training.callbacks.base import Callback
from onnxgrad.training.fields import Fields
from onnxgrad.training.objective import Objective
from onnxgrad.training.parameters.choice import matching_weights
from onnxgrad.training.parameters.equal_constants import separate_merged
from onnxgrad.training.precision import resolved
from onnxgrad.training.trainer import Trainer

_SHARE = 0.2
_MOST = 0.9  # of the rows that can be held out


@dataclass
class Job:
    """A `Trainer`, and the data that it gets.

    - `proto`: the model of the user, with a new head or adapters.
    - `task`: the data as a whole; `training` and `validation`: their parts, or other data.
    - `classes`: labels of the classes, also those of the model.
    - `keep`: what writes into the metadata of the trained model.
    """

    trainer: Trainer
    proto: ModelProto
    task: Task
    training: Task
    validation: Task | None
    classes: Labels | None = None
    keep: list[Callable[[ModelProto], None]] = field(default_factory=list)
    pruned: bool = False
    finish: Callable[[ModelProto], ModelProto] | None = None  # what a task does to it in the end

    @property
    def validation_rows(self) -> int | None:
        """The number of rows of the validation data."""
        return None if self.validation is None else self.validation.rows

    def fit(self, options: TrainOptions, epochs: int, resume: str | None = None) -> None:
        """Train, from the checkpoint in the folder `resume` on."""
        data = self.training.data
        held = None if self.validation is None else self.validation.data
        self.trainer.fit(
            data.X,
            data.y,
            sample_weight=data.sample_weight,
            validation=None if held is None else (held.X, held.y, held.sample_weight),
            epochs=epochs,
            batch_size=options.batch_size,
            shuffle=options.shuffle,
            resume=resume,
        )

    def trained_model(self) -> ModelProto:
        """Return the model with the current weights."""
        if self.pruned:  # the trainer has a model without outputs that might be the loss
            self.trainer._change_job(proto=separate_merged(self.proto))
        model = self.trainer.model
        for write in self.keep:
            write(model)
        return model if self.finish is None else self.finish(model)


def fine_tune(proto: ModelProto, options: TrainOptions) -> ModelProto:
    """Return the model with a new head and adapters, as far as the options ask for them."""
    if options.head is not None:
        proto = _add_head(proto, options, _units(options.head))
    if options.lora:
        from onnxgrad.adapters.lora import add_lora

        proto = add_lora(
            proto,
            options.lora,
            rank=options.lora_rank,
            alpha=options.lora_alpha,
            dropout=options.lora_dropout,
            seed=options.seed,
        )
    return proto


def _units(head: str) -> int | list[str]:
    """Return the number of units, or the names of the classes."""
    names = names_in(head)
    if len(names) > 1 and all(names):
        return names
    if not head.isdigit() or not int(head):
        raise ValueError(
            f"--head {head!r} is neither a number of units nor several names of classes, separated "
            "by commas"
        )
    return int(head)


def _add_head(proto: ModelProto, options: TrainOptions, units: int | list[str]) -> ModelProto:
    """Return the model with a new layer instead of an old one, or on features."""
    pool, mask, seed = options.head_pool, options.head_mask, options.seed
    at = options.head_at
    if pool is None:
        from onnxgrad.finetune.heads import replace_head

        if mask is not None:
            raise ValueError("--head-mask needs --head-pool mean")
        return replace_head(proto, units, at[0] if len(at) == 1 else at or None, seed=seed)
    from onnxgrad.finetune.add_head import POOLS, add_head

    if pool not in (*POOLS, "none"):
        raise unknown("way to pool (--head-pool)", pool, [*POOLS, "none"])
    if mask is not None and pool != "mean":
        raise ValueError("--head-mask needs --head-pool mean")
    if len(at) > 1:
        raise ValueError(f"--head-pool puts the new layer on one value, not on {at}")
    chosen = None if pool == "none" else pool
    return add_head(proto, units, at[0] if at else None, pool=chosen, mask=mask, seed=seed)


def named_classes(options: LabelOptions) -> list[str] | None:
    """Return the names of classes of `--classes` or `--head`; None without any."""
    if options.classes is not None:
        return names_in(options.classes)
    head = options.head if isinstance(options, TrainOptions) else None
    return names_in(head) if head and "," in head else None


def known_classes(options: LabelOptions, proto: ModelProto) -> Labels | None:
    """Return the labels of the classes by number, of the options or else of the model."""
    return named_classes(options) or class_names(proto)


def prepare(options: TrainOptions, proto: ModelProto, callbacks: Sequence[Callback]) -> Job:
    """Return the trainer and its data."""
    options, told = with_loss_of(proto, options)
    options, more = with_parts(options, "train")
    arguments = trainer_arguments(options)
    proto = fine_tune(proto, options)
    separated = separate_merged(proto)
    matching_weights(separated, options.train, "weight")
    matching_weights(separated, options.freeze, "weight (--freeze)")
    classes = known_classes(options, proto)
    model = with_loss(proto, arguments["loss"], options.loss_output)
    keys = ("loss", "loss_options", "loss_weights", "device")
    scored = ModelWithLoss(model, **{key: arguments[key] for key in keys})
    task, objective = map_data(options, options.data, scored, classes)
    check_classes(options, objective)
    task.notes[:0] = told + more

    def other(path: str) -> Task:
        scored.names.columns.update(task.names.columns)
        scored.names.target = task.names.target or scored.names.target
        scored.names.weight = task.names.weight or scored.names.weight
        return map_data(options, path, scored, classes)[0]

    training, validation = parts(options, task, None, other)
    arguments["class_weight"] = _class_weight(arguments, objective, classes)
    if not options.metrics:
        arguments["metrics"] = default_metrics(task, objective)
    trainer = Trainer(model, callbacks=callbacks, **arguments)
    trainer._names = task.names
    check_monitor(options, trainer, validation is not None)
    _check_effects(options, proto, validation is not None)
    size, rows = options.batch_size, training.rows
    if size is not None and rows is not None and size > rows:
        raise ValueError(f"--batch-size {size} is more than the {rows} rows to train on")
    job = Job(trainer, proto, task, training, validation, classes or task.names.classes or None)
    job.pruned = model is not proto
    if (named := named_classes(options)) is not None:
        job.keep.append(lambda model: write_note(model, CLASSES, list(named)))
    return job


def _check_effects(options: TrainOptions, proto: ModelProto, validated: bool) -> None:
    """Raise `ValueError` for options that have no effect on this model or without validation."""
    if options.metrics and not validated:
        raise ValueError(
            "--metrics are of validation data, and there are none: pass --validation SHARE or a "
            "file, or leave them out"
        )
    if options.precision != "auto" and resolved("auto", proto, Device.of("cpu")) == "file":
        raise ValueError(
            f"--precision {options.precision} has no effect: the model has no floats of 16 bits"
        )


def check_monitor(options: TrainOptions, trainer: Trainer, validated: bool) -> None:
    """Raise `ValueError` if the history will not have what is monitored."""
    if options.early_stopping is None and options.monitor is None:
        return
    names, monitor = ["loss", "learning_rate"], options.monitor or "validation_loss"
    if validated:
        names.append("validation_loss")
        for output, metrics in trainer._job.metrics.items():
            prefix = "validation_" if output is None else f"validation_{output}_"
            names += [f"{prefix}{metric.name}" for metric in metrics]
    if monitor in names:
        return
    if not validated and monitor.startswith("validation_"):
        raise ValueError(
            f"{monitor} is monitored, and there are no validation data: pass --validation SHARE or "
            "a file, or --monitor loss"
        )
    raise unknown("number to watch (--monitor)", monitor, names)


def map_data(
    options: Any, path: str, scored: ModelWithLoss, classes: Labels | None
) -> tuple[Task, Objective]:
    """Return the data at `path` for a model and its loss, and what describes both."""
    source, labels = open_data(path, options, scored.job.proto), None
    if isinstance(source, FileTable):
        several = (
            scored.job.loss
            if isinstance(scored.job.loss, dict) and len(scored.job.loss) > 1
            else ()
        )
        with begin_errors(source):
            targets = Targets.of(options, source.columns, scored.names, list(several))
            source = _numbered(source, targets, scored, classes)
            labels = {
                output: source.cells(each, "the target").side_by_side(nan=True)
                for output, each in targets.columns.items()
            }
    objective = scored.describe(labels.get(None, labels or None) if labels else None)
    # labels of a table are numbers of classes already
    scored.names.classes = [] if isinstance(source, FileTable) else classes or []
    objective.names = scored.names
    with begin_errors(source):
        if isinstance(source, FileTable):
            return map_table(source, objective, targets, options), objective
        if isinstance(source, ImageSource):
            return map_images(source, objective, classes), objective
        if isinstance(source, TextSource):
            return map_texts(source), objective
        return map_arrow(source, objective, options, classes), objective


def _numbered(
    table: FileTable, targets: Targets, scored: ModelWithLoss, classes: Labels | None
) -> FileTable:
    """Return the table with numbers of classes in the columns of labels that are classes.

    Several columns of one class index a row are shares of classes, and those of several scores
    have a class each: these are numbers already.
    """
    known: dict[str, tuple[bool, int | None]] = {}
    if classes is not None:
        objective = scored.describe(None)
        fields = Fields(objective)
        for label, columns in targets.by_label(objective).items():
            field = fields.fields[label]
            shares = len(columns) > 1 and len(field.shape or ()) == 1
            own = label in fields.classified or not objective.labels
            known |= dict.fromkeys(columns, (own and not shares, field.ignored))
    for name in targets.names:
        encodes, ignored = known.get(name, (True, None))
        numeric = scored.numeric_loss
        table = table.encode(name, classes if encodes else None, numeric, ignored)
    return table


def check_classes(options: LabelOptions, objective: Objective) -> None:
    """Raise `ValueError` if `--classes` are more or fewer than the model has."""
    if options.classes is None:
        return
    every = objective.labels.values()
    infos = [info for info in every if isinstance(info.classes, int)]
    if every and not any(i.classes is not None or i.threshold is not None for i in every):
        raise ValueError(
            "--classes names classes, and the loss compares with numbers: leave it out, or choose "
            "a loss of classes, such as cross_entropy"
        )
    count = len(names_in(options.classes))
    if count and len(infos) == 1 and infos[0].classes != count:
        raise ValueError(
            f"--classes names {count} classes, and the output {infos[0].prediction!r} has "
            f"{infos[0].classes}: name all in their order, or train a new last layer with "
            f"--head {options.classes}"
        )


def default_metrics(task: Task, objective: Objective) -> list[str]:
    """Return the metrics of texts, or of data whose only labels are classes; or else none."""
    if isinstance(task.data.X, Texts):
        return ["perplexity"]
    infos = list(objective.labels.values())
    classes = [i for i in infos if i.classes is not None or i.threshold is not None]
    return ["accuracy"] if len(infos) == len(classes) == 1 else []


def parts(
    options: TrainOptions, task: Task, held_out: Task | None, other: Callable[[str], Task]
) -> tuple[Task, Task | None]:
    """Return the data to train on, and those to validate on.

    `held_out` are those that the data hold out themselves, and `other` reads a file of such.
    """
    share = _share(options.validation)
    if share is None and options.validation is not None:
        return task, other(options.validation)
    if share is None and held_out is not None:
        return task, held_out
    reader = task.data.X
    splits = task.in_memory or reader.subset(np.arange(1)) is not None
    share = (_SHARE if splits else 0.0) if share is None else share
    if not share:
        return task, None
    if not splits:
        raise ValueError(
            f"--validation {share:g} of data that are read while training: name a file of "
            "validation data instead, or 0"
        )
    assert task.rows is not None
    if options.validation is None and not round(task.rows * share):
        task.notes.append(f"no row is held out: {share:g} of {task.rows} rows is none")
        return task, None
    first, second = split(task.rows, share, options.seed)
    return task.take(first), task.take(second)


def _share(text: str | None) -> float | None:
    """Return the share of rows that `--validation` names; None if it names a file, or nothing."""
    try:
        share = float(text) if text is not None else None
    except ValueError:
        return None
    if share is not None and not 0 <= share <= _MOST:
        raise ValueError(f"--validation {text} must be from 0 to {_MOST}, or a file")
    return share


def _class_weight(arguments: dict[str, Any], objective: Objective, classes: Labels | None) -> Any:
    """Return the weights of classes by their numbers, as a `Trainer` takes them."""
    counts = [i.classes for i in objective.labels.values() if isinstance(i.classes, int)]
    count = next(iter(counts), max(2, len(classes or ())))
    weight = weights_by_number(arguments["class_weight"], classes or (), count)
    if isinstance(weight, dict) and isinstance(arguments["loss"], dict):
        return dict.fromkeys(arguments["loss"], weight)
    return weight
