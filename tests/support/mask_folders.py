"""Folders of pictures with masks of classes, and a model of pixels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from PIL import Image

from tests.support.models import parse_model


def pixel_model(channels=3, size="6,7", dtype="float", last=False) -> onnx.ModelProto:
    """Return a model of one convolution that sees a pixel only."""
    rng = np.random.default_rng(channels)
    activation = "Sigmoid(s)" if channels == 1 else "Identity(s)"
    shape, body = [f"N,3,{size}", f"N,{channels},{size}"], "s = Conv(x, w, b)"
    if last:
        shape = [f"N,{size},3", f"N,{size},{channels}"]
        body = """t = Transpose <perm = [0, 3, 1, 2]> (x)  c = Conv(t, w, b)
            s = Transpose <perm = [0, 2, 3, 1]> (c)"""
    text = f"""f ({dtype}[{shape[0]}] x) => ({dtype}[{shape[1]}] y) {{
        {body} y = {activation} }}"""
    kind = np.dtype({"float": "f4", "double": "f8"}[dtype])
    w, b = rng.normal(size=(channels, 3, 1, 1)).astype(kind), np.zeros(channels, kind)
    return parse_model(text, opset=20, w=w, b=b)


COLORS = np.array([[0, 0, 0], [255, 0, 0], [0, 255, 0]], np.uint8)


def random_picture(rng, size=(12, 14), classes=3) -> tuple[np.ndarray, np.ndarray]:
    """Return a picture of rectangles in the colors of their classes, and its mask."""
    mask = np.zeros(size, np.uint8)
    for number in range(1, classes):
        top, left = rng.integers(0, size[0] - 5), rng.integers(0, size[1] - 5)
        mask[top : top + 5, left : left + 5] = number
    return COLORS[mask], mask


def write_masks(root: Path, count=6, mode="L", size=(12, 14), classes=3, edit=None) -> Path:
    """Write pictures and masks."""
    rng = np.random.default_rng(0)
    for part in ("images", "masks"):
        (root / part).mkdir(parents=True)
    for i in range(count):
        picture, mask = random_picture(rng, size, classes)
        mask = mask if edit is None else edit(mask)
        image = Image.fromarray(mask)
        if mode == "P":
            image.putpalette(rng.integers(0, 256, 768).astype(np.uint8).tobytes())
        elif mode == "1":
            image = Image.fromarray(mask > 0)
        Image.fromarray(picture).save(root / "images" / f"{i}.png")
        image.save(root / "masks" / f"{i}.png")
    return root


def first_batch(reader, size=99, seed=None):
    """Return pictures and labels of the first batch."""
    return next(reader.batches(size, seed, 0))
