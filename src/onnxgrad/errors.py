"""Error classes of the package, and helpers for messages that name mistake and remedy.

Messages show names from model files, so their control characters are escaped.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any


def printable(text: object) -> str:
    """Return `text` on one line, with escapes such as `\\x1b` for unprintable characters.

    These are line ends and other control characters, characters that change the direction of text
    or have no width, and code points to which Unicode assigns no character.
    """
    text = str(text)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def node_text(node: Any) -> str:
    """Return a text for messages about an `onnx_ir` node: operator, name and first output."""
    return f"{printable(node.op_type)} (node {node.name!r}, output {node.outputs[0].name!r})"


def printable_lines(text: object) -> str:
    """Return a text of several lines with each line made `printable`."""
    return "\n".join(map(printable, str(text).split("\n")))


def escape(error: BaseException | None) -> None:
    """Escape unprintable characters in the messages of `error` and of its causes, in place."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        shown = [printable_lines(a) if isinstance(a, str) else a for a in error.args]
        if shown != [*error.args]:
            error.args = tuple(shown)
        error = error.__cause__ or error.__context__


@contextmanager
def escaping() -> Iterator[None]:
    """Escape unprintable characters in errors that the `with` block, or the decorated function,
    raises.

    onnx and onnxruntime put names from model files into their messages without escaping them.
    """
    try:
        yield
    except Exception as e:
        escape(e)
        raise


class PrintableError(Exception):
    """Base of the package's errors: unprintable characters in the message are escaped."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(printable_lines(a) if isinstance(a, str) else a for a in args))


class ModelError(PrintableError, ValueError):
    """A model cannot be used: it is no ONNX file, or is truncated, invalid or too large.

    Also raised if the file of a model's external data is missing, and if a model exceeds one of the
    limits of `set_limits`. It is a `ValueError`.

    Examples:
        >>> import onnxgrad as og
        >>> try:
        ...     og.onnx_derivative(b"not a model")
        ... except og.ModelError:
        ...     print("cannot be read")
        cannot be read
    """


class NoGradientRule(PrintableError, NotImplementedError):
    """The gradient has to pass an operator without a gradient rule for its inputs or attributes.

    The message names the node and the path to it from an input. Write a rule with `rule`, or stop
    the gradient before the node. It is a `NotImplementedError`.

    Examples:
        >>> import onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20, "acme": 1]>
        ...     f (float[N] x) => (float[N] y) { y = acme.Foo(x) }''')
        >>> try:
        ...     og.onnx_derivative(model)
        ... except og.NoGradientRule as error:
        ...     print("acme" in str(error))
        True
    """


class ConvergenceError(PrintableError, RuntimeError):
    """The training loss or the validation loss became NaN or infinite.

    The trainer keeps its state from before the failure: the weights are finite. With `exc=False`,
    `fit` issues a `ConvergenceWarning` instead. It is a `RuntimeError`.

    Examples:
        >>> import numpy as np
        >>> import onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,1] x) => (float[N,1] y) <float[1] w = {2.0}> { y = Mul(x, w) }''')
        >>> x = np.ones((20, 1), np.float32)
        >>> trainer = og.compat.OrtGradientForwardBackwardOptimizer(
        ...     model, ["w"], learning_rate=1e30)
        >>> try:
        ...     trainer.fit(x, x)
        ... except og.ConvergenceError:
        ...     print("the learning rate is too high")
        the learning rate is too high
    """


class ConvergenceWarning(PrintableError, UserWarning):
    """A loss became NaN or infinite and `fit` ended early, in a trainer with `exc=False`.

    The trainer keeps its state from before the failure, as with `ConvergenceError`.

    Examples:
        >>> import warnings
        >>> import numpy as np, onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,1] x) => (float[N,1] y) <float[1] w = {2.0}> { y = Mul(x, w) }''')
        >>> x = np.ones((20, 1), np.float32)
        >>> trainer = og.compat.OrtGradientForwardBackwardOptimizer(
        ...     model, ["w"], learning_rate=1e30, exc=False)
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     _ = trainer.fit(x, x)
        >>> caught[0].category is og.ConvergenceWarning
        True
    """


class EvaluationError(PrintableError, RuntimeError):
    """A method was called before the method that prepares it, such as `build_onnx_function`.

    Losses and penalties need `build_onnx_function` first, learning rates `init_learning_rate`, and
    `backward` needs `forward(..., training=True)`. Also raised if `OrtGradientForwardBackward` with
    `debug=True` computes NaN or infinity. It is a `RuntimeError`.

    Examples:
        >>> import numpy as np
        >>> import onnxgrad as og
        >>> x = np.ones((2, 1), np.float32)
        >>> try:
        ...     og.compat.LearningRateSGD().update_weights(x, gradient=x)
        ... except og.metrics.EvaluationError:
        ...     print("call init_learning_rate first")
        call init_learning_rate first
    """


class ProviderError(PrintableError, ValueError):
    """The installed onnxruntime has no execution provider for the requested device.

    The message lists the available providers. It is a `ValueError`.

    Examples:
        >>> import onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N] x) => (float[N] y) <float[1] w = {2.0}> { y = Mul(x, w) }''')
        >>> try:
        ...     og.compat.OrtGradientForwardBackward(model, providers=["NoSuchProvider"])
        ... except og.ProviderError:
        ...     print("not available")
        not available
    """


class ProcessLostError(PrintableError, RuntimeError):
    """A process of the group that trains a model ended, or does not answer.

    The state before the step is kept, and a `Checkpoint` writes it. It is a `RuntimeError`.

    Examples:
        >>> import onnxgrad as og
        >>> issubclass(og.parallel.ProcessLostError, RuntimeError)
        True
    """


class Face:
    """How messages name arguments: this base class names them as keywords of a Python call.

    Another face, such as the command line, has other words for them. `first` is the number that
    users give to the first row or column.
    """

    first = 0

    def named(self, python: str) -> str:
        """Return how users write the argument or function whose Python name is `python`."""
        return python

    def given(self, argument: str, *value: Any) -> str:
        """Return an argument as users write it: `name=value`, or `name=` without a value.

        An argument of a dict of options is given with the name of the dict: `loss_options.alpha`.
        """
        name = argument.rpartition(".")[2]
        return f"{name}={value[0]!r}" if value else f"{name}="


_face = Face()


@contextmanager
def speaking(face: Face) -> Iterator[None]:
    """Let messages in the block name arguments as `face` does: as in Python, or as in the shell."""
    global _face
    before, _face = _face, face
    try:
        yield
    finally:
        _face = before


def named(python: str) -> str:
    """Return how users write the argument or function whose Python name is `python`."""
    return _face.named(python)


def argument(name: str, *value: Any) -> str:
    """Return an argument as users write it: `name=value`, or `name=` without a value."""
    return _face.given(name, *value)


def first_number() -> int:
    """Return the index of the first row or column as users count: 0 in Python."""
    return _face.first


def not_installed(what: str, package: str, extra: str) -> ImportError:
    """Return an ImportError for the optional `package`, which onnxgrad[`extra`] installs."""
    return ImportError(f"{what} needs {package}: pip install 'onnxgrad[{extra}]'")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, without onnxruntime's C++ source location."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rpartition("` failed: ")[2]


def unknown(kind: str, name: object, valid: Iterable[str], close: Iterable[str] = ()) -> ValueError:
    """Return a ValueError for an unknown `name`, whose message suggests similar valid names.

    It suggests the names `close` if there are any, else valid names that are spelled similarly.
    """
    names = [str(v) for v in valid]
    lower = {n.lower(): n for n in names}
    matches = difflib.get_close_matches(str(name).lower(), lower, n=3, cutoff=0.5)
    close = list(dict.fromkeys(close)) or [lower[n] for n in matches]
    hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
    listed = ", ".join(map(repr, names[:20])) + (", ..." if len(names) > 20 else "")
    return ValueError(f"Unknown {kind} {name!r}.{hint} Valid: {listed or 'none'}.")


def join_first(texts: Sequence[object], most: int, separator: str = ", ") -> str:
    """Return the first `most` texts, joined by `separator`, and the count of further texts."""
    more = f"{separator}and {len(texts) - most} more" if len(texts) > most else ""
    return separator.join(map(str, texts[:most])) + more


def check_options(
    what: str, options: Iterable[str], function: Callable[..., Any], skip: int = 0
) -> None:
    """Raise `ValueError` if a name in `options` is not a parameter of `function`.

    Args:
        what: the kind of option in the message, such as "option of loss 'huber'".
        options: names of options.
        function: function or class that takes the options by name.
        skip: number of leading parameters that are not options.
    """
    valid = list(signature(function).parameters)[skip:]
    for name in options:
        if name not in valid:
            raise unknown(what, name, valid)
