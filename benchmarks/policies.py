"""Mean returns of a policy in gymnasium's CartPole-v1: before, after behavior cloning, after PPO.

    pip install gymnasium
    python benchmarks/policies.py [SEED ...]

The code is the code of docs/policies.md, whose `CartPole` is replaced by gymnasium's environments.
A return is the mean over the first episodes of 100 environments, with actions drawn from the
policy; the table is for the page.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.support.pages import blocks_of


class CartPole:
    """Environments of gymnasium with the interface of the page's `CartPole`."""

    def __init__(self, count: int, seed: int) -> None:
        mode = gymnasium.vector.AutoresetMode.SAME_STEP
        self.environments = gymnasium.vector.SyncVectorEnv(
            [lambda: gymnasium.make("CartPole-v1")] * count, autoreset_mode=mode
        )
        self.obs, _ = self.environments.reset(seed=seed)

    def step(self, action: np.ndarray) -> np.ndarray:
        """Push each cart; return whether its episode ended, so that one begins."""
        self.obs, _, fallen, late, _ = self.environments.step(action)
        return fallen | late


def run_page() -> dict[str, Any]:
    """Return the names that the cells of the page define, with environments of gymnasium."""
    names: dict[str, Any] = {}
    for block in blocks_of("policies.md"):
        if block.kind == "python" and "page_setup" not in block.code:
            exec(block.code, names)
            names["CartPole"] = CartPole
    return names


def train(page: dict[str, Any], seed: int) -> list[float]:
    """Return the mean returns: of a new policy, of the demonstrator's clone, and after PPO."""
    og, model, poles, rows = page["og"], page["new_policy"](seed), CartPole(8, 100 + seed), []
    for _ in range(500):
        rows.append((poles.obs, page["demonstrate"](poles.obs)))
        poles.step(rows[-1][1])
    obs, action = map(np.concatenate, zip(*rows, strict=True))
    options = {"freeze": ["v*", "d*"], "seed": seed}
    clone = og.Trainer(model, {"logits": "cross_entropy"}, **options).fit(obs, action, epochs=5)
    options = {"optimizer": "adam", "learning_rate": 1e-3, "seed": seed}
    trainer = og.Trainer(clone.model, page["loss"], **options)
    models, rng = [model, clone.model], np.random.default_rng(seed)
    for _ in range(2):
        page["improve"](trainer, CartPole(16, 200 + seed), 30, rng)
        models.append(trainer.model)
    return [page["mean_return"](each, CartPole(100, seed=1)) for each in models]


def main() -> None:
    """Print a line of the table for each seed."""
    seeds = [int(word) for word in sys.argv[1:]] or list(range(5))
    os.chdir(tempfile.mkdtemp())
    page, began = run_page(), time.perf_counter()
    names = "gymnasium", "numpy", "onnxruntime"
    print(", ".join(f"{name} {version(name)}" for name in names))
    print("| seed | new | behavior cloning | PPO, 30 rounds | PPO, 60 rounds |")
    print("|---|---|---|---|---|")
    for seed in seeds:
        print(f"| {seed} | {' | '.join(f'{value:.0f}' for value in train(page, seed))} |")
    print(f"{(time.perf_counter() - began) / len(seeds):.0f} seconds for each seed")


if __name__ == "__main__":
    main()
