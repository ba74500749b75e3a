"""A leading axis of members, pushed through a graph and the bodies of its nodes."""

from onnxgrad.autodiff.members import bodies
from onnxgrad.autodiff.members.axis import MemberAxis

__all__ = ["MemberAxis"]
