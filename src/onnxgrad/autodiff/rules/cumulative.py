"""Cumulative sums and products."""

from __future__ import annotations

from onnxgrad.autodiff.rules.registry import rule


@rule("CumSum")
def cum_sum(op, node, g):
    """y_i = sum of x_j, j <= i:  dx_j = sum of g_i, i >= j."""
    return _cumulated(op.CumSum, node, g, backwards=True), None


@rule("CumProd")
def cum_prod(op, node, g):
    """y_i = prod of x_j, j <= i:  dx_k = sum over i >= k of g_i times the product without x_k.

    That is the product of those that are not zero, over x_k if it is one of them, where no other is
    zero. Where one other is, it is a factor: it makes the product zero, but not its slope.
    """
    x = node.inputs[0]
    zero = op.Equal(x, 0.0)
    nonzero = op.Where(zero, 1.0, x)
    product = g * _cumulated(op.CumProd, node, nonzero)
    zeros = _cumulated(op.CumSum, node, op.Cast(zero, to=x.dtype))  # how many up to i
    factor = _cumulated(op.CumSum, node, op.Where(zero, x, 0.0))

    def total(count, factor=None):
        """Return the sum of the products with so many zeros, times `factor`."""
        chosen = op.Where(op.Equal(zeros, count), product, 0.0)
        return _cumulated(
            op.CumSum, node, chosen if factor is None else chosen * factor, backwards=True
        )

    of_zero = total(1.0) + (total(2.0, factor) - x * total(2.0))
    return op.Where(zero, of_zero, (total(0.0) + total(1.0, factor)) / nonzero), None


def _cumulated(cumulate, node, v, backwards=False):
    reverse = node.attributes.get_int("reverse", 0)
    exclusive = node.attributes.get_int("exclusive", 0)
    return cumulate(
        v, node.inputs[1], exclusive=exclusive, reverse=1 - reverse if backwards else reverse
    )
