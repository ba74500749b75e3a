"""A leading axis of members, pushed through a graph: how operators and bodies take it."""

from onnxgrad.autodiff.members import bodies, per_operator
from onnxgrad.autodiff.members.axis import MemberAxis

__all__ = ["MemberAxis"]
