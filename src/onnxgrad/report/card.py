"""`write_card`: a model card of a trained model."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto

from onnxgrad.errors import join_first, printable
from onnxgrad.estimator import NotFittedError
from onnxgrad.model.files import check_writable, replacement_file
from onnxgrad.report.environment import machine_and_versions
from onnxgrad.training.callbacks.history import json_value
from onnxgrad.training.callbacks.trackers import logged_arguments
from onnxgrad.training.diagnose import KeptWeights, end_reason
from onnxgrad.training.trainer import Trainer

CARD = "README.md"
UNKNOWN, _UNKNOWN_SENTENCE = "unknown", "Unknown."
_SHOWN = 20  # weights by name; epochs in the table of results
_VALIDATION = "validation_"
_NO_RESULT = ("step", "epoch", "learning_rate", "loss_scale", "skipped_steps")
_INTRODUCTION = (
    "Trained with onnxgrad. What this card does not know, it calls unknown: the author of the "
    "model can add it."
)


def write_card(
    trainer: Any,
    path: str | os.PathLike,
    *,
    name: str | None = None,
    license: str | None = None,
    base: str | os.PathLike | None = None,
    data: str | None = None,
    use: str | None = None,
    tags: Iterable[str] = (),
    overwrite: bool = True,
) -> Path:
    """Write a model card of a trained model: Markdown, with YAML at its head.

    The form is the one of Hugging Face (Mitchell et al. 2019, arXiv:1810.03993): license and
    metrics for programs, then the base, the data with their rows and a digest, the arguments of
    training, the results of the history, versions and machine. The card calls unknown each fact
    that neither the trainer nor the arguments state.

    Args:
        trainer: a `Trainer` after `fit`.
        path: the file, or a folder, which gets `README.md`.
        name: of the model; None: the name of its graph.
        license: an identifier such as "mit" or "apache-2.0".
        base: the file of the model that was trained, whose name and SHA-256 digest are written.
        data: a description of the data, in words.
        use: the purpose of the model, and its limits, in words.
        tags: more tags beside "onnx" and "onnxgrad".
        overwrite: whether a file of this name is replaced.

    Returns:
        The file that was written.

    Raises:
        NotFittedError: nothing was trained yet.
        ValueError: a `TrainerStack`.
        OSError: the file cannot be written, or exists and is not replaced; `base` cannot be read.

    Examples:
        >>> import tempfile, numpy as np, onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,2] x) => (float[N,1] y) <float[2,1] w = {0.0, 0.0}> { y = MatMul(x, w) }
        ... ''')
        >>> X = np.random.default_rng(0).normal(size=(100, 2)).astype(np.float32)
        >>> trainer = og.Trainer(model, "squared_error").fit(X, X[:, :1], validation=0.2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     card = og.plot.write_card(trainer, folder, license="mit", data="Noise.")
        ...     print(card.name, card.read_text().splitlines()[:2])
        README.md ['---', 'license: "mit"']
    """
    if trainer._job.members is not None:
        raise ValueError(
            "write_card describes one model, and the trainer of a stack trains several: write the "
            "card by hand"
        )
    if not trainer.state.history:
        raise NotFittedError("nothing was trained yet: call fit first")
    target = Path(path) / CARD if Path(path).is_dir() else Path(path)
    check_writable(target, overwrite, [] if base is None else [base])
    title = name or trainer._job.proto.graph.name or UNKNOWN
    recorded_data = (trainer.state.identity or {}).get("data")
    sections = [
        _yaml_metadata(trainer.state.history, license, tags),
        f"# {_escape_cell(title)}",
        _INTRODUCTION,
        f"## Use and limits\n\n{use or _UNKNOWN_SENTENCE}",
        f"## License\n\n{license or _UNKNOWN_SENTENCE}",
        f"## Base model\n\n{_fact_table(_base_model_facts(trainer._job.proto, base))}",
        f"## Data\n\n{data or _UNKNOWN_SENTENCE}\n\n{_fact_table(_data_facts(recorded_data))}",
        f"## Training\n\n{_fact_table(_training_facts(trainer))}",
        f"## Results\n\n{_result_table(trainer.state.history)}",
        f"## Versions and machine\n\n{_fact_table(machine_and_versions())}",
    ]
    with replacement_file(target) as file:
        file.write_text("\n\n".join(sections) + "\n", encoding="utf-8")
    return target


def _yaml_metadata(history: list[dict[str, Any]], license: str | None, tags: Iterable[str]) -> str:
    """Return the card's YAML metadata: license, library, tags and names of metrics."""
    lines = [f"license: {json.dumps(license or UNKNOWN)}", 'library_name: "onnx"', "tags:"]
    lines += [f"- {json.dumps(str(tag))}" for tag in dict.fromkeys(["onnx", "onnxgrad", *tags])]
    metrics = [n for n in history[-1] if n.startswith(_VALIDATION) and n != f"{_VALIDATION}loss"]
    if metrics:
        lines += ["metrics:", *(f"- {json.dumps(n.removeprefix(_VALIDATION))}" for n in metrics)]
    return "\n".join(["---", *lines, "---"])


def _training_facts(trainer: Trainer) -> dict[str, Any]:
    """Return {fact: value} on a training: its duration, arguments, and the names of some
    weights.
    """
    state, identity = trainer.state, trainer.state.identity or {}
    kept, names = KeptWeights.from_state(state), list(trainer.trained)
    count = sum(int(np.prod(w.shape)) for w in state.weights.values())
    return {
        "epochs": state.epoch,
        "steps": state.step,
        "weights are those of step": kept.step,
        "weights are those of epoch": kept.epoch if kept.whole else f"{kept.epoch}, in part",
        "rows of a batch": identity.get("batch_size", UNKNOWN),
        "shuffled": identity.get("shuffle", UNKNOWN),
        "ended because": end_reason(trainer) or UNKNOWN,
        "trained weights": f"{len(names)}, of {count:,} elements",
        "their names": join_first(names, _SHOWN),
        **json_value(logged_arguments(trainer)),
    }


def _base_model_facts(proto: ModelProto, base: str | os.PathLike | None) -> dict[str, Any]:
    """Return {fact: value} on the model before the training: file, digest, graph and producer."""
    file, digest = UNKNOWN, UNKNOWN
    if base is not None:
        with open(base, "rb") as opened:
            file, digest = Path(base).name, hashlib.file_digest(opened, "sha256").hexdigest()
    return {
        "file": file,
        "SHA-256": digest,
        "graph": proto.graph.name or UNKNOWN,
        "producer": f"{proto.producer_name} {proto.producer_version}".strip() or UNKNOWN,
        "opsets": ", ".join(f"{e.domain or 'ai.onnx'} {e.version}" for e in proto.opset_import),
        "nodes": len(proto.graph.node),
    }


def _data_facts(description: Any) -> dict[str, Any]:
    """Return {fact: value} on the training data: the count of rows, the digest and the shapes."""
    known = dict(description) if isinstance(description, Mapping) else {}
    facts = {"rows": known.pop("rows", UNKNOWN), "digest": known.pop("digest", UNKNOWN)}
    if isinstance(known.get("inputs"), Mapping):
        for name, entry in known.pop("inputs").items():
            shaped = isinstance(entry, Mapping) and {"dtype", "shape"} <= {*entry}
            facts[f"input {name}"] = f"{entry['dtype']} {entry['shape']}" if shaped else entry
    return facts | known


def _result_table(history: list[dict[str, Any]]) -> str:
    """Return a Markdown table of the numbers in the history's last entries."""
    names = dict.fromkeys(n for entry in history for n, v in entry.items() if isinstance(v, Real))
    columns = ["epoch", "step", *(n for n in names if n not in _NO_RESULT)]
    remarks = []
    if not any(n.startswith(_VALIDATION) for n in columns):
        remarks = ["No validation data were given: how the model does on other rows is unknown."]
    if len(history) > _SHOWN:
        remarks.append(f"The last {_SHOWN} of {len(history)} records.")
    rows = [[entry.get(n, "") for n in columns] for entry in history[-_SHOWN:]]
    return "\n\n".join([*remarks, _markdown_table(columns, rows)])


def _fact_table(facts: Mapping[str, Any]) -> str:
    return _markdown_table(["", ""], facts.items())


def _markdown_table(names: list[str], rows: Iterable[Iterable[Any]]) -> str:
    return "\n".join(
        f"| {' | '.join(map(_escape_cell, line))} |"
        for line in (names, ["---"] * len(names), *rows)
    )


def _escape_cell(value: Any) -> str:
    """Return the text of a value for a cell of a Markdown table, on one line and escaped."""
    if isinstance(value, float):
        value = f"{value:.5g}"
    text = printable(json.dumps(value) if isinstance(value, (dict, list)) else value)
    for character in ("\\", "|", "<", "*", "_", "`", "["):
        text = text.replace(character, f"\\{character}")
    return text
