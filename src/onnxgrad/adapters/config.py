"""The settings of adapters, in the metadata of a model and in PEFT's `adapter_config.json`."""

from __future__ import annotations

import json
import math
import re
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from onnxgrad.reporting import frames_inside

CONFIG = "adapter_config.json"
# values of init_lora_weights with which PEFT does not change the frozen weights
_PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal")


def adapter_options(
    rank: int,
    alpha: float | None = None,
    scaling: float = 1.0,
    *,
    dropout: float = 0.0,
    use_rslora: bool = False,
    use_dora: bool = False,
) -> dict[str, Any]:
    """Return the settings of an adapter, with the keys "rank", "alpha", "scaling" and so on, as the
    metadata of a model stores them.

    Without `alpha`, `scaling` is the factor of A B, and alpha follows from it.
    """
    if alpha is None:
        alpha = scaling * rank
    else:
        scaling = alpha / (math.sqrt(rank) if use_rslora else rank)
    return {
        "rank": rank,
        "alpha": float(alpha),
        "dropout": float(dropout),
        "use_rslora": bool(use_rslora),
        "use_dora": bool(use_dora),
        "scaling": float(scaling),
    }


def peft_config(notes: Sequence[Mapping[str, Any]], modules_to_save: list[str]) -> dict[str, Any]:
    """Return the content of PEFT's `adapter_config.json` for adapters, given their settings
    `notes`.
    """
    if len({note["use_dora"] for note in notes}) > 1:
        raise ValueError(
            "adapters with and without use_dora cannot be in one file: save a model in which all "
            "adapters have use_dora, or none"
        )
    rank, alpha, dropout = (
        Counter(note[name] for note in notes).most_common(1)[0][0]
        for name in ("rank", "alpha", "dropout")
    )
    dropouts = {note["dropout"] for note in notes if note["form"] != "embedding"}
    if len(dropouts) > 1 or len({note["use_rslora"] for note in notes}) > 1:
        warnings.warn(
            "adapter_config.json has one dropout and one use_rslora for all adapters, and these "
            "differ: the file states the most frequent dropout, and alpha for alpha / rank",
            stacklevel=frames_inside() + 1,
        )
    rslora = all(note["use_rslora"] for note in notes)
    alphas = {n["module"]: n["alpha"] if rslora else n["scaling"] * n["rank"] for n in notes}
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": _whole_number_as_int(alpha),
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
            f"^{re.escape(module)}": _whole_number_as_int(a)
            for module, a in alphas.items()
            if a != alpha
        },
    }


def read_config(source: Path) -> dict[str, Any]:
    """Return the `LoraConfig` of PEFT, as a dict, from an adapter folder or from the metadata of a
    `.safetensors` file.

    Raises:
        FileNotFoundError: the folder or the metadata has no `adapter_config.json`.
        ValueError: the settings are damaged, or describe adapters of another kind.
    """
    path = source if source.is_file() else source / CONFIG
    try:
        if path.name == CONFIG:
            text = path.read_text(encoding="utf-8")
        else:
            with safe_open(path, framework="numpy") as file:
                text = (file.metadata() or {})[CONFIG]
        config = json.loads(text)
    except (FileNotFoundError, KeyError):
        raise FileNotFoundError(
            f"{source} holds no adapter, as it has no {CONFIG}: name a folder "
            "that save_adapter or PEFT wrote"
        ) from None
    except (ValueError, SafetensorError) as e:
        raise ValueError(f"{path} is damaged: {e}. Save the adapter again") from None
    kind = config.get("peft_type") if isinstance(config, dict) else None
    if kind != "LORA":
        raise ValueError(
            f"{path} has peft_type {kind!r}: only LORA can be loaded. Merge these adapters "
            "in PEFT (merge_and_unload) and export the model again, or train LoRA (add_lora)"
        )
    if config.get("init_lora_weights", True) not in _PLAIN_INITS:
        raise ValueError(
            f"{path} has init_lora_weights={config['init_lora_weights']!r}, which changes the "
            "frozen weights: convert to LoRA in PEFT (path_initial_model_for_weight_conversion)"
        )
    return config


def options_of_module(config: Mapping[str, Any], module: str, rank: int) -> dict[str, Any]:
    """Return the settings of the adapter of `module`, whose rank is `rank`, from a `LoraConfig` of
    PEFT.

    Alpha is the value of the first entry of alpha_pattern that matches the module, or the end of
    its path.
    """
    patterns = config.get("alpha_pattern") or {}
    matched = [a for p, a in patterns.items() if re.fullmatch(rf"(?:.*\.)?(?:{p})", module)]
    return adapter_options(
        rank,
        float(matched[0] if matched else config.get("lora_alpha", 8)),
        dropout=config.get("lora_dropout") or 0.0,
        use_rslora=config.get("use_rslora", False),
        use_dora=config.get("use_dora", False),
    )


def _whole_number_as_int(number: float) -> float | int:
    return int(number) if float(number).is_integer() else number
