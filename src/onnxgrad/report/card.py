"""`write_card`: what is known of a trained model, as a model card."""

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

from onnxgrad.errors import printable
from onnxgrad.estimator import NotFittedError
from onnxgrad.model.files import check_writable, replacing
from onnxgrad.report.environment import environment
from onnxgrad.training.callbacks.history import json_value
from onnxgrad.training.callbacks.trackers import parameters_of
from onnxgrad.training.diagnose import Kept, end_reason

CARD = "README.md"
UNKNOWN = "unknown"
_SHOWN = 20  # weights by name; epochs in the table of results
_NO_RESULT = ("step", "epoch", "learning_rate", "loss_scale", "skipped_steps")


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
    """Write what is known of a trained model as a model card: Markdown, with YAML at its head.

    The form is that of the cards of Hugging Face (Mitchell et al. 2019, arXiv:1810.03993): license
    and metrics for programs, then the base, the data with their rows and a digest, the arguments of
    training, the results of the history, versions and machine. What is not known is said to be
    unknown; nothing is made up.

    Args:
        trainer: a `Trainer` after `fit`.
        path: the file, or a folder, which gets `README.md`.
        name: of the model; None: that of its graph.
        license: an identifier such as "mit" or "apache-2.0".
        base: the file of the model that was trained, whose name and SHA-256 digest are written.
        data: what the data are, in words.
        use: what the model is for, and its limits, in words.
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
    _check(trainer)
    target = Path(path) / CARD if Path(path).is_dir() else Path(path)
    check_writable(target, overwrite, [] if base is None else [base])
    title = f"# {_text(name or trainer._job.proto.graph.name or UNKNOWN)}"
    parts = [_head(trainer, license, tags), title, _INTRODUCTION]
    parts += _sections(trainer, base, {"license": license, "data": data, "use": use})
    with replacing(target) as file:
        file.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return target


def _check(trainer: Any) -> None:
    """Raise for a trainer of which there is no card."""
    if trainer._job.members is not None:
        raise ValueError("write_card describes one model, and a stack has several members")
    if not trainer.state.history:
        raise NotFittedError("nothing was trained yet: call fit first")


_INTRODUCTION = (
    "Trained with onnxgrad. What this card does not know, it calls unknown: the author of the "
    "model can add it."
)


def _head(trainer: Any, license: str | None, tags: Iterable[str]) -> str:
    """Return the metadata, in YAML, whose strings are those of JSON."""
    lines = [f"license: {json.dumps(license or UNKNOWN)}", 'library_name: "onnx"', "tags:"]
    lines += [f"- {json.dumps(str(tag))}" for tag in dict.fromkeys(["onnx", "onnxgrad", *tags])]
    names = [
        n.removeprefix("validation_") for n in trainer.state.history[-1] if n in _measured(trainer)
    ]
    if names:
        lines += ["metrics:", *(f"- {json.dumps(n)}" for n in dict.fromkeys(names))]
    return "\n".join(["---", *lines, "---"])


def _measured(trainer: Any) -> list[str]:
    """Return the names of the metrics of validation data, without the loss."""
    names = dict.fromkeys(n for entry in trainer.state.history for n in entry)
    return [n for n in names if n.startswith("validation_") and n != "validation_loss"]


def _sections(
    trainer: Any, base: str | os.PathLike | None, words: Mapping[str, str | None]
) -> list[str]:
    """Return the sections behind the introduction."""
    state, identity = trainer.state, trainer.state.identity or {}
    kept = Kept.of(state)
    training = {
        "epochs": state.epoch,
        "steps": state.step,
        "weights are those of step": kept.step,
        "weights are those of epoch": kept.epoch if kept.whole else f"{kept.epoch}, in part",
        "rows of a batch": identity.get("batch_size", UNKNOWN),
        "shuffled": identity.get("shuffle", UNKNOWN),
        "ended because": end_reason(trainer) or UNKNOWN,
        **_trained(trainer),
        **json_value(parameters_of(trainer)),
    }
    return [
        f"## Use and limits\n\n{_words(words['use'])}",
        f"## License\n\n{_words(words['license'])}",
        "## Base model\n\n" + _table(("", ""), _base(trainer._job.proto, base)),
        f"## Data\n\n{_words(words['data'])}\n\n" + _table(("", ""), _data(identity.get("data"))),
        "## Training\n\n" + _table(("", ""), training.items()),
        "## Results\n\n" + _results(state.history),
        "## Versions and machine\n\n" + _table(("", ""), environment().items()),
    ]


def _trained(trainer: Any) -> dict[str, Any]:
    """Return how many weights train, and the names of some."""
    names = list(trainer.trained)
    count = sum(int(np.prod(w.shape)) for w in trainer.state.weights.values())
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return {
        "trained weights": f"{len(names)}, of {count:,} elements",
        "their names": ", ".join(names[:_SHOWN]) + more,
    }


def _base(proto: ModelProto, base: str | os.PathLike | None) -> list[tuple[str, Any]]:
    """Return what is known of the model that was trained."""
    file: list[tuple[str, Any]] = [("file", UNKNOWN), ("SHA-256", UNKNOWN)]
    if base is not None:
        with open(base, "rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        file = [("file", Path(base).name), ("SHA-256", digest)]
    opsets = ", ".join(f"{e.domain or 'ai.onnx'} {e.version}" for e in proto.opset_import)
    return [
        *file,
        ("graph", proto.graph.name or UNKNOWN),
        ("producer", f"{proto.producer_name} {proto.producer_version}".strip() or UNKNOWN),
        ("opsets", opsets),
        ("nodes", len(proto.graph.node)),
    ]


def _data(description: Any) -> list[tuple[str, Any]]:
    """Return what the training says of its data: rows, shapes and a digest."""
    known = dict(description) if isinstance(description, Mapping) else {}
    rows = [("rows", known.pop("rows", UNKNOWN)), ("digest", known.pop("digest", UNKNOWN))]
    if isinstance(known.get("inputs"), Mapping):
        for name, entry in known.pop("inputs").items():
            shaped = isinstance(entry, Mapping) and {"dtype", "shape"} <= {*entry}
            shown = f"{entry['dtype']} {entry['shape']}" if shaped else entry
            rows.append((f"input {name}", shown))
    return rows + [(key, value) for key, value in known.items()]


def _results(history: list[dict[str, Any]]) -> str:
    """Return a table of the numbers of the history, of the last evaluations if there are many."""
    names = dict.fromkeys(n for entry in history for n, v in entry.items() if isinstance(v, Real))
    measured = [n for n in names if n not in _NO_RESULT]
    shown = history[-_SHOWN:]
    cut = f"The last {_SHOWN} of {len(history)} records.\n\n" if len(history) > _SHOWN else ""
    missing = (
        ""
        if any(n.startswith("validation_") for n in measured)
        else ("No validation data were given: how the model does on other rows is unknown.\n\n")
    )
    rows = [[entry.get(n, "") for n in ("epoch", "step", *measured)] for entry in shown]
    return missing + cut + _table(("epoch", "step", *measured), rows)


def _table(names: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """Return a table of Markdown."""
    names = list(names)
    lines = [names, ["---"] * len(names), *([_number(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(map(_text, line))} |" for line in lines)


def _number(value: Any) -> Any:
    return f"{value:.5g}" if isinstance(value, float) else value


def _words(text: str | None) -> str:
    return text or UNKNOWN.capitalize() + "."


def _text(value: Any) -> str:
    """Return a value on one line, whose characters mean nothing in a table of Markdown."""
    text = printable(json.dumps(value) if isinstance(value, (dict, list)) else value)
    for character in ("\\", "|", "<", "*", "_", "`", "["):
        text = text.replace(character, f"\\{character}")
    return text
