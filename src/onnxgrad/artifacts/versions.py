"""Models for older runtimes."""

from __future__ import annotations

from onnx import ModelProto

from onnxgrad.model.opsets import min_ir_version


def with_ir_version(model: ModelProto, version: int | None) -> ModelProto:
    """Return `model` at an IR version, modified in place; None: it stays as it is.

    Raises:
        ValueError: the opsets of the model need a newer one.
    """
    if version is None:
        return model
    least = min_ir_version(list(model.opset_import))
    if not isinstance(version, int) or version < least:
        opsets = {o.domain or "ai.onnx": o.version for o in model.opset_import}
        raise ValueError(
            f"ir_version={version!r} is too old for the opsets {opsets}, which need {least}: pass "
            "that, or an older opset="
        )
    model.ir_version = version
    return model
