"""Einsum: the gradient with respect to an operand is an Einsum of the others.

numpy and onnxruntime broadcast named indices of length one, as they do the axes of an ellipsis, and
so do the gradients. If an input has an ellipsis, the output must have it too.
"""

from __future__ import annotations

from string import ascii_letters

import onnx_ir as ir

from onnxgrad.autodiff.registry import Unsupported, rule
from onnxgrad.graph.shapes import broadcast, dims, einsum_terms, equal, rank

DOTS = "..."


@rule("Einsum")
def einsum(op, node, g):
    """y = sum a b ...:  da = sum g b ... over the indices that a lacks.

    Laue, Mitterreiter & Giesen 2020, A simple and efficient tensor calculus, arXiv:2010.03313.
    """
    terms, output = einsum_terms(node.attributes.get_string("equation", ""))
    if DOTS not in output and any(DOTS in term for term in terms):
        return Unsupported("its ellipsis is not in its output; name the axes that are summed")
    terms, output = _named_dots(node.inputs, terms, output)
    return [_by_operand(op, node.inputs, terms, k, g, output) for k in range(len(terms))]


def _named_dots(xs, terms, output):
    """Return the terms with letters in place of the ellipsis, if the ranks are static.

    An Einsum sums over named indices only. The axes of an ellipsis are summed after it, so that its
    result is larger.
    """
    pairs = [(rank(x), term) for x, term in zip(xs, terms, strict=True) if DOTS in term]
    counts = {None if n is None else n - len(term.replace(DOTS, "")) for n, term in pairs}
    if len(counts) != 1 or None in counts:
        return terms, output
    free = [c for c in ascii_letters if c not in "".join(terms)]
    names = "".join(free[: counts.pop()])
    return [term.replace(DOTS, names) for term in terms], output.replace(DOTS, names)


def _by_operand(op, xs, terms, k, g, output):
    """Return the gradient with respect to operand k."""
    x, term, letters = xs[k], terms[k], terms[k].replace(DOTS, "")
    if 0 in (dims(x) or ()):  # onnxruntime's Einsum and Expand are wrong for empty tensors
        return op.zeros_like(x)
    if DOTS in term[1:]:  # move it to the front: axes are then counted from the end
        x, back = _dots_first(op, x, term)
        xs, terms = [*xs[:k], x, *xs[k + 1 :]], [*terms[:k], DOTS + letters, *terms[k + 1 :]]
        return op.Einsum(_by_operand(op, xs, terms, k, g, output), equation=back)
    others, sources = [*xs[:k], *xs[k + 1 :]], [output, *terms[:k], *terms[k + 1 :]]
    kept = [c for c in dict.fromkeys(letters) if c in "".join(sources)]
    target = (DOTS if DOTS in output else "") + "".join(kept)
    dx = g
    if sources != [target]:
        dx = op.Einsum(g, *others, equation=f"{','.join(sources)}->{target}")
    new = [i for i, c in enumerate(letters) if c not in kept or letters.index(c) < i]
    if new:
        dx = op.Unsqueeze(dx, [i - len(letters) for i in new])
        dx = _on_diagonals(op, dx, x, letters)
    full = broadcast(dims(dx), dims(x))
    if not equal(dims(dx), full):
        dx = op.Expand(dx, op.shape_of(x))
        dx.shape = None if full is None else ir.Shape(full)
    return op.sum_to(dx, x)


def _dots_first(op, x, term):
    """Return x with the axes of its ellipsis first, and the equation that moves them back."""
    head, _, tail = term.partition(DOTS)
    names = ascii_letters[: len(head + tail)]
    original, front = names[: len(head)] + DOTS + names[len(head) :], DOTS + names
    return op.Einsum(x, equation=f"{original}->{front}"), f"{front}->{original}"


def _on_diagonals(op, dx, x, letters):
    """Return dx where all axes of x with the same letter have the same index, else zero."""

    def positions(axis):
        line = op.arange(op.dim(x, axis))
        return op.Unsqueeze(line, list(range(1, -axis))) if axis < -1 else line

    for i, c in enumerate(letters):
        first = letters.index(c)
        if first < i:
            same = op.Equal(*(positions(axis - len(letters)) for axis in (first, i)))
            dx = op.Where(same, dx, 0.0)
    return dx
