"""Write what the page trains with into `artifacts/`: the digits, and a network to start from.

Usage: python make_artifacts.py [FOLDER]
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from pyarrow import parquet
from safetensors import safe_open
from safetensors.numpy import load_file, save

import onnxgrad as og

HERE = Path(__file__).parent
DATA = HERE.parents[2] / "data"
HELD_OUT = 360  # the last images: the page measures its accuracy on them


def main(folder: Path) -> None:
    """Write the artifacts of an untrained network, a trained state, and the images."""
    model = DATA / "digits_cnn.onnx"
    og.artifacts.generate_artifacts(model, None, None, "cross_entropy", "adam", folder)
    table = parquet.read_table(DATA / "digits.parquet")
    images = np.stack([table[f"pixel_{i}"].to_numpy() for i in range(64)], axis=1)
    images, labels = images.astype(np.float32).reshape(-1, 1, 8, 8), table["label"].to_numpy()
    trainer = og.Trainer(model, loss="cross_entropy", optimizer="adam", metrics=["accuracy"])
    trainer.fit(images[:-HELD_OUT], labels[:-HELD_OUT], epochs=20)
    print(trainer.evaluate(images[-HELD_OUT:], labels[-HELD_OUT:]))
    state = load_file(folder / "checkpoint.safetensors")
    with safe_open(folder / "checkpoint.safetensors", "numpy") as file:
        metadata = file.metadata()
    pretrained = state | dict(trainer.state.weights)  # the slots are those of a new training
    (folder / "pretrained.safetensors").write_bytes(save(pretrained, metadata))
    pixels = np.round(images.reshape(-1, 8, 8) * 16).astype(np.uint8)
    arrays = {"images": pixels, "labels": labels.astype(np.uint8)}
    content = save(arrays, {"held_out": str(HELD_OUT)})
    (folder / "digits.safetensors").write_bytes(content)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "artifacts")
