"""Imports onnx_ir without sympy, whose import takes longer than all other imports of a training.

onnx_ir imports it for the arithmetic of symbolic lengths, which this package does not use.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_DEFERRED = ("sympy", "onnx_ir._symbolic_shapes")


class _DeferredModule(ModuleType):
    """A stand-in for a module, which imports the module when an attribute is first read."""

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:  # the import of onnx_ir uses it
            del sys.modules[self.__name__]
        module = import_module(self.__name__)
        vars(self).update(vars(module))
        return getattr(module, name)


@contextmanager
def _defer_imports(names: Sequence[str]) -> Iterator[None]:
    """In the block, imports of the modules `names` that are not imported yet return stand-ins."""
    added = {name: _DeferredModule(name) for name in names if name not in sys.modules}
    sys.modules.update(added)
    try:
        yield
    finally:
        for name, module in added.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]


class _OnnxIrFinder:
    """An import finder that finds onnx_ir, and leaves `sys.meta_path` after this one import."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "onnx_ir":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_with_stand_ins(module: ModuleType) -> None:
                with _defer_imports(_DEFERRED):
                    execute(module)

            spec.loader.exec_module = execute_with_stand_ins  # type: ignore[method-assign]
        return spec


def defer_sympy_import() -> None:
    """Let the first import of onnx_ir defer the import of sympy until an attribute of
    sympy is read.
    """
    if "onnx_ir" not in sys.modules:
        sys.meta_path.insert(0, _OnnxIrFinder())
