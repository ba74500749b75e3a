"""`adapter_config.json`: the settings of adapters in the form of PEFT."""

from __future__ import annotations

import json
import re
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

CONFIG = "adapter_config.json"
# initial values that leave the frozen weights as they are
_PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal")


def config_of(notes: Sequence[Mapping[str, Any]], modules_to_save: list[str]) -> dict[str, Any]:
    """Return the settings of adapters as a `LoraConfig` of PEFT has them."""
    if len({note["use_dora"] for note in notes}) > 1:
        raise ValueError("adapters with and without use_dora cannot be in one file")
    rank, alpha, dropout = (
        Counter(note[name] for note in notes).most_common(1)[0][0]
        for name in ("rank", "alpha", "dropout")
    )
    dropouts = {note["dropout"] for note in notes if note["form"] != "embedding"}
    if len(dropouts) > 1 or len({note["use_rslora"] for note in notes}) > 1:
        warnings.warn(
            "adapter_config.json has one dropout and one use_rslora for all adapters, and these "
            "differ: the file states the most frequent dropout, and alpha for alpha / rank",
            stacklevel=3,
        )
    rslora = all(note["use_rslora"] for note in notes)
    alphas = {n["module"]: n["alpha"] if rslora else n["scaling"] * n["rank"] for n in notes}
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": _plain(alpha),
        "lora_dropout": dropout,
        "use_rslora": rslora,
        "use_dora": notes[0]["use_dora"],
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "target_modules": [note["module"] for note in notes],
        "modules_to_save": modules_to_save or None,
        "rank_pattern": {
            f"^{re.escape(n['module'])}": n["rank"] for n in notes if n["rank"] != rank
        },
        "alpha_pattern": {
            f"^{re.escape(module)}": _plain(a) for module, a in alphas.items() if a != alpha
        },
    }


def read_config(source: Path) -> dict[str, Any]:
    """Return the settings of the adapters in a folder, or in the metadata of a file of tensors.

    Raises:
        FileNotFoundError: there are none.
        ValueError: they are damaged, or of adapters of another kind.
    """
    path = source if source.is_file() else source / CONFIG
    try:
        config = json.loads(_text(path))
    except FileNotFoundError:
        raise FileNotFoundError(f"{source} holds no adapter: it has no {CONFIG}") from None
    except (ValueError, SafetensorError) as e:
        raise ValueError(f"{path} is damaged: {e}") from None
    kind = config.get("peft_type") if isinstance(config, dict) else None
    if kind != "LORA":
        raise ValueError(
            f"{path} describes adapters of the kind {kind!r}: only LORA can be loaded. Merge them "
            "in PEFT (merge_and_unload) and export the model again, or train LoRA (add_lora)"
        )
    if config.get("init_lora_weights", True) not in _PLAIN_INITS:
        raise ValueError(
            f"{path} has init_lora_weights={config['init_lora_weights']!r}, which changes the "
            "frozen weights: convert it to LoRA in PEFT (path_initial_model_for_weight_conversion)"
        )
    return config


def _text(path: Path) -> str:
    if path.name == CONFIG:
        return path.read_text(encoding="utf-8")
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata() or {}
    if CONFIG not in metadata:
        raise FileNotFoundError(path)
    return metadata[CONFIG]


def options_of(config: Mapping[str, Any], module: str, rank: int) -> dict[str, Any]:
    """Return the settings of the adapter of one module, with the rank that its tensors have."""
    alpha = float(_first_match(config.get("alpha_pattern"), module, config.get("lora_alpha", 8)))
    rslora = bool(config.get("use_rslora", False))
    return {
        "rank": rank,
        "alpha": alpha,
        "dropout": float(config.get("lora_dropout") or 0.0),
        "use_rslora": rslora,
        "use_dora": bool(config.get("use_dora", False)),
        "scaling": alpha / (rank**0.5 if rslora else rank),
    }


def _first_match(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """Return the value of the first pattern that is the module, or the end of its path."""
    for pattern, value in (patterns or {}).items():
        if re.fullmatch(rf"(?:.*\.)?(?:{pattern})", module):
            return value
    return default


def _plain(number: float) -> float | int:
    return int(number) if float(number).is_integer() else number
