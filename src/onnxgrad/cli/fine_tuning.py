"""The new layers that options of `onnxgrad train` give a model."""

from __future__ import annotations

from onnx import ModelProto

from onnxgrad.cli.train_options import TrainOptions
from onnxgrad.errors import unknown


def fine_tune(proto: ModelProto, options: TrainOptions) -> ModelProto:
    """Return the model with a new head and adapters, as far as the options ask for them."""
    if options.head is not None:
        proto = _add_head(proto, options, _head_units(options.head))
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


def _head_units(head: str) -> int | list[str]:
    """Return the number of units, or the names of the classes."""
    names = split_names(head)
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


def split_names(text: str) -> list[str]:
    """Return the names that commas separate, with or without blanks around them."""
    return [name.strip() for name in text.split(",")]
