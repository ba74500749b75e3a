"""Models as the tools of onnxruntime quantize them.

Types and formats are named as onnxruntime's enumerations name them: "QUInt8", "QDQ".
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from onnxgrad.model.read import read


def _named_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options with the members of enumerations that texts name."""
    from onnxruntime.quantization import QuantFormat, QuantType

    kinds = {"weight_type": QuantType, "activation_type": QuantType, "quant_format": QuantFormat}
    return {n: kinds[n][v] if n in kinds and isinstance(v, str) else v for n, v in options.items()}


def static_model(
    model: onnx.ModelProto, folder: Path, batches: Iterable[dict], **options: Any
) -> onnx.ModelProto:
    """Return a model as `quantize_static` writes it, calibrated by these batches."""
    from onnxruntime.quantization import CalibrationDataReader, quantize_static

    class BatchReader(CalibrationDataReader):
        def __init__(self):
            self.rest = iter(batches)

        def get_next(self):
            return next(self.rest, None)

    options = {"activation_type": "QUInt8"} | options
    onnx.save(model, folder / "float.onnx")
    quantize_static(
        folder / "float.onnx", folder / "static.onnx", BatchReader(), **_named_options(options)
    )
    return read(folder / "static.onnx")


def dynamic_model(model: onnx.ModelProto, folder: Path, **options: Any) -> onnx.ModelProto:
    """Return a model as `quantize_dynamic` writes it."""
    from onnxruntime.quantization import quantize_dynamic

    onnx.save(model, folder / "float.onnx")
    quantize_dynamic(folder / "float.onnx", folder / "dynamic.onnx", **_named_options(options))
    return read(folder / "dynamic.onnx")


def weight_only_model(model: onnx.ModelProto, **options: Any) -> onnx.ModelProto:
    """Return a model whose products have weights of few bits, as `MatMulNBits` or as QDQ."""
    from onnxruntime.quantization.matmul_nbits_quantizer import (
        DefaultWeightOnlyQuantConfig,
        MatMulNBitsQuantizer,
    )

    options = _named_options({"quant_format": "QOperator"} | options)
    excluded = options.pop("nodes_to_exclude", None)
    config = DefaultWeightOnlyQuantConfig(op_types_to_quantize=("MatMul",), **options)
    copied = onnx.ModelProto()
    copied.CopyFrom(model)
    quantizer = MatMulNBitsQuantizer(copied, algo_config=config, nodes_to_exclude=excluded)
    quantizer.process()
    return quantizer.model.model


def few_bit_operands(
    bits: int, k: int, n: int, zeros: str = "", order: bool = False, block: int = 16
) -> dict[str, np.ndarray]:
    """Return operands of a MatMulNBits with K=k, N=n."""
    rng, blocks = np.random.default_rng(bits), -(-k // block)
    operands = {
        "w": rng.integers(0, 256, (n, blocks, block * bits // 8)).astype(np.uint8),
        "scales": rng.uniform(0.01, 0.1, n * blocks).astype(np.float32),
    }
    if zeros == "packed":
        shape = n * -(-blocks * bits // 8)
        operands["zeros"] = rng.integers(0, 256, shape).astype(np.uint8)
    if zeros == "float":
        operands["zeros"] = rng.uniform(0, 2**bits, n * blocks).astype(np.float32)
    if order:
        operands["order"] = rng.permutation(np.arange(k) // block).astype(np.int32)
    return operands
