"""The keys of weights in the `state_dict` of a module."""

from __future__ import annotations

from torch import nn


def state_keys(names: list[str], root: nn.Module) -> dict[str, str]:
    """Return the key of every weight in `state_dict`: its name, with underscores if needed."""
    used_keys, modules, keys = set[str](), set[str](), dict[str, str]()
    inner = nn.Module()

    def impossible(parts: list[str]) -> int | None:
        """Return the index of the first part that PyTorch does not allow."""
        for i, part in enumerate(parts):
            path = ".".join(parts[: i + 1])
            used = path in used_keys or (i == len(parts) - 1 and path in modules)
            if not part or used or hasattr(inner if i else root, part):
                return i
        return None

    for change in (False, True):  # first, the names that need no change
        for name in names:
            parts = name.split(".")
            while change and name not in keys and (i := impossible(parts)) is not None:
                parts[i] += "_"
            if name not in keys and impossible(parts) is None:
                keys[name] = ".".join(parts)
                used_keys.add(keys[name])
                modules.update(".".join(parts[:i]) for i in range(1, len(parts)))
    return {name: keys[name] for name in names}


def register(module: nn.Module, key: str, parameter: nn.Parameter) -> None:
    """Register a parameter under the dotted `key`, and create the submodules that it needs."""
    *path, last = key.split(".")
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    module.register_parameter(last, parameter)
