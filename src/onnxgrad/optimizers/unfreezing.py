"""Groups of weights that begin to train one after the other."""

from __future__ import annotations

from collections.abc import Iterable

from onnxgrad.checks import check_count
from onnxgrad.optimizers.base import Optimizer
from onnxgrad.optimizers.groups import ParamGroup, param_groups
from onnxgrad.optimizers.presets import select


def gradual_unfreezing(
    patterns: Iterable[str],
    every: int,
    optimizer: str | Optimizer = "adamw",
    rate: float = 1.0,
) -> Optimizer:
    """Train the weights of the first pattern, after `every` steps also those of the second, ...

    Howard & Ruder 2018, arXiv:1801.06146, section 3.3, where it is an epoch from group to group,
    and lower layers have smaller rates. See `start` of `ParamGroup`.

    Args:
        patterns: of `fnmatch`, from the layers that train first, such as the head, to those that
            train last; "*" at the end are all others.
        every: number of steps from one group to the next.
        optimizer: that of all groups, by name or as an object.
        rate: factor of the learning rate from each group to the next; 1 / 2.6 in the paper.

    Raises:
        ValueError: as `param_groups`; no pattern; another `every` than an integer of 1 or more.

    Examples:
        >>> import onnxgrad as og
        >>> optimizer = og.optimizers.gradual_unfreezing(["head.*", "layer4.*", "*"], every=100)
        >>> optimizer.for_weight("layer4.conv.weight", (8, 8, 3, 3)).start
        100
    """
    if isinstance(patterns, str):  # its letters would be the patterns
        raise ValueError(f"patterns is a list: write [{patterns!r}]")
    check_count("every", every)
    chosen = list(patterns)
    if not chosen or len(set(chosen)) < len(chosen):
        raise ValueError(f"patterns are one or more different ones, not {chosen}")
    own = select(optimizer)
    return param_groups(
        {p: ParamGroup(own, rate**i, start=i * every) for i, p in enumerate(chosen)}
    )
