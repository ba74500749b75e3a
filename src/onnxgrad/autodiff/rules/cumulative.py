"""Cumulative sums and products."""

from __future__ import annotations

from onnxgrad.autodiff.registry import rule


@rule("CumSum")
def cum_sum(op, node, g):
    """y_i = sum of x_j, j <= i:  dx_j = sum of g_i, i >= j."""
    return _cumulated(op.CumSum, node, g, backwards=True), None


@rule("CumProd")
def cum_prod(op, node, g):
    """y_i = prod of x_j, j <= i:  dx_k = sum over i >= k of g_i times the product without x_k.

    Right where some x_j are zero. The product without x_k is computed from the product of all
    nonzero factors, divided by x_k if that is not zero; it is zero if another factor is. A single
    other zero stays a factor, so that second derivatives are right too.
    """
    x = node.inputs[0]
    zero = op.Equal(x, 0.0)
    nonzero = op.Where(zero, 1.0, x)
    product = g * _cumulated(op.CumProd, node, nonzero)
    zeros = _cumulated(op.CumSum, node, op.Cast(zero, to=x.dtype))  # number of zeros up to i
    factor = _cumulated(op.CumSum, node, op.Where(zero, x, 0.0))

    def total(count, factor=None):
        """Return the sum of the products with `count` zeros, times `factor`."""
        selected = op.Where(op.Equal(zeros, count), product, 0.0)
        return _cumulated(
            op.CumSum, node, selected if factor is None else selected * factor, backwards=True
        )

    of_zero = total(1.0) + (total(2.0, factor) - x * total(2.0))
    return op.Where(zero, of_zero, (total(0.0) + total(1.0, factor)) / nonzero), None


def _cumulated(cumulate, node, v, backwards=False):
    reverse = node.attributes.get_int("reverse", 0)
    exclusive = node.attributes.get_int("exclusive", 0)
    return cumulate(
        v, node.inputs[1], exclusive=exclusive, reverse=1 - reverse if backwards else reverse
    )
