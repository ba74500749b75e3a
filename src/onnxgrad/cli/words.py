"""Messages that name arguments of Python, in words of the command line."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

_OPTIONS = {
    **{name: name for name in "train freeze optimizer validation recompute device seed".split()},
    **{name: name for name in "epochs accumulate dropout resume metrics loss shuffle".split()},
    **{"units": "head", "at": "head-at", "pool": "head-pool", "mask": "head-mask"},
    **{"rank": "lora-rank", "alpha": "lora-alpha", "loss_options": "loss-option"},
    **{"loss_weights": "loss-weight", "learning_rate": "learning-rate", "clip_norm": "clip-norm"},
    **{"batch_size": "batch-size", "sample_weight": "sample-weight", "batch_norm": "batch-norm"},
    **{"class_weight": "class-weight", "output_index": "output-index"},
}
_NAMES = frozenset("class_weight sample_weight loss_options loss_weights batch_norm".split())
_OF_A_LOSS = "axis from_logits soft_labels".split()
_FEATURES = "a value of the model with --head-at NAME --head-pool none, or mean, first, image"
PHRASES = {
    "put a new head behind a value of the model by add_head": f"put the new layer on {_FEATURES}",
    "put a new head behind the output by add_head": f"put the new layer on {_FEATURES}",
    "cut the model with features(model, at=...) and put another head there by add_head": (
        f"put the new layer on {_FEATURES}"
    ),
    "add_head(model, units, at=...) puts one in their place": f"put the new layer on {_FEATURES}",
    "use add_head(model, units, at=...)": f"put the new layer on {_FEATURES}",
    "build it with add_loss_output(..., weight_name='weight')": (
        "leave out --sample-weight, or name a loss with --loss"
    ),
    "Pass fit(..., validation=...)": "Pass --validation",
    "add_lora adds them": "`onnxgrad train --lora PATTERN` adds them",
    "List the weights to choose otherwise": "--train and --freeze choose otherwise",
    "another one of onnxgrad.LOSSES": "another one of `onnxgrad train --help`",
    "or the output by output=, one of": "on the way to one of the outputs",
    "pass y=None": "leave out --target",
    "as loss={output: loss}": "as --loss OUTPUT=LOSS",
    "pass inputs={input: output}": "give its inputs the names of the outputs that they take",
    "or start anew without resume": "or name another folder for a new training",
}
_VALUES = {"True": "true", "False": "false"}  # as JSON, in which options of a loss are


def in_options(message: str, options: Collection[str]) -> str:
    """Return a message with options instead of the arguments of Python that it names.

    Args:
        message: that of an error or a warning.
        options: the fields of the options of the command; others are left as they are.
    """
    for phrase, words in PHRASES.items():
        message = message.replace(phrase, words)
    names = {n: o for n, o in _OPTIONS.items() if o.replace("-", "_") in options}
    if "loss_option" in options:
        names |= dict.fromkeys(_OF_A_LOSS, "loss-option")
    if not names:
        return message
    # an argument begins a word, and no column or path: those are quoted
    start = rf"(?<![\w'\"./-])({'|'.join(names)})"
    value = r"None|True|False|'[^']*'|-?\d+(?:\.\d+)?|(?=[\s,.;:)\[({<]|$)"
    message = re.sub(f"{start}=({value})", lambda match: _shown(match, names), message)
    named = rf"{start}(?=[\s:,])"  # words such as loss are no names of arguments here
    return re.sub(named, lambda m: f"--{names[m[1]]}" if m[1] in _NAMES else m[1], message)


def _shown(match: re.Match[str], names: Mapping[str, str]) -> str:
    """Return an argument and its value as an option."""
    name, value = match.groups()
    option = f"--{names[name]}"
    if name in _OF_A_LOSS:
        return f"{option} {name}={_VALUES.get(value, value)}"
    if value == "None":
        return f"no {option}"
    follows = value or match.string[match.end() : match.end() + 1] in tuple("[({<")
    return f"{option} {value.strip(chr(39))}" if follows else option
