"""Files of one row: milliseconds of training a row, beside a loop of PyTorch over the rows.

Each network is a module of PyTorch, which is exported with a batch of one row. onnxgrad trains the
file, and PyTorch runs the module for each row of a batch, as the module takes one row. Both take
turns; printed are the medians of the time of a row, their ratio (above 1, onnxgrad is faster), and
the largest difference of the weights after the first epoch.

    taskset -c 1 python benchmarks/one_row.py [NAME ...] [--rounds 7]
"""

from __future__ import annotations

import argparse
import io
import logging
import time
import warnings
from statistics import median

import numpy as np
import onnx
import torch
from torch import Tensor, nn

import onnxgrad as og

ROWS, BATCH, RATE = 256, 32, 1e-3


def dense(width: int, hidden: int, outputs: int) -> nn.Sequential:
    first, last = nn.Linear(width, hidden), nn.Linear(hidden, outputs)
    return nn.Sequential(first, nn.LayerNorm(hidden), nn.ReLU(), last, nn.Sigmoid())


class Cascade(nn.Module):
    """A detector of wake words, and a second one that runs if the first has found a word."""

    shapes = ((16, 96),)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = dense(1536, 128, 1), dense(1536, 64, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x.flatten(1))
        if bool(y >= 0.5):
            y = self.second(x.flatten(1))
        return y


class Scaled(nn.Module):
    """A network that divides its row by the largest number of all axes."""

    shapes = ((64,),)

    def __init__(self) -> None:
        super().__init__()
        self.body = dense(64, 64, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x / x.abs().max())


class Apart(nn.Module):
    """A network whose nodes keep the rows apart."""

    shapes = ((64,),)

    def __init__(self) -> None:
        super().__init__()
        self.body = dense(64, 64, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Stream(nn.Module):
    """A detector of voices, whose recurrent state goes from row to row: each row is a batch."""

    shapes = ((129, 4), (2, 128))

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv1d(129, 128, 3, 1, 1), nn.ReLU(), nn.Conv1d(128, 64, 3, 2, 1), nn.ReLU(),
            nn.Conv1d(64, 128, 3, 2, 1), nn.ReLU(),
        )  # fmt: skip
        self.cell, self.last = nn.LSTMCell(128, 128), nn.Linear(128, 1)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        h, c = self.cell(self.encoder(x)[:, :, 0], (state[:, 0], state[:, 1]))
        return torch.sigmoid(self.last(h)), torch.stack((h, c), 1)


NETWORKS: dict[str, type] = {"cascade": Cascade, "scaled": Scaled, "apart": Apart, "stream": Stream}


def exported(module: nn.Module) -> onnx.ModelProto:
    """Return the file of a module, with a batch of one row."""
    file, names = io.BytesIO(), [["x", "state"], ["y", "next"]]
    examples = tuple(torch.randn(1, *shape) for shape in module.shapes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            torch.jit.script(module.eval()), examples, file, dynamo=False, opset_version=17,
            input_names=names[0][: len(examples)], output_names=names[1][: len(examples)],
        )  # fmt: skip
    return onnx.load_from_string(file.getvalue())


class Turns:
    """Epochs of one network, by onnxgrad and by a loop of PyTorch."""

    def __init__(self, module: nn.Module) -> None:
        rng = np.random.default_rng(0)
        self.module, self.carries = module, len(module.shapes) > 1
        self.x = rng.standard_normal((ROWS, *module.shapes[0])).astype(np.float32)
        self.y = rng.integers(0, 2, (ROWS, 1)).astype(np.float32)
        self.data = {"x": self.x}
        if self.carries:
            self.data["state"] = np.zeros((ROWS, *module.shapes[1]), np.float32)
        self.batch = 1 if self.carries else BATCH
        arguments = {"carry": {"state": "next"}} if self.carries else {}
        optimizer = og.optimizers.sgd()
        self.trainer = og.Trainer(
            exported(module), {"y": "bce"}, optimizer=optimizer, learning_rate=RATE, **arguments
        )
        self.optimizer = torch.optim.SGD(module.parameters(), RATE)

    def train_file(self) -> None:
        self.trainer.fit(self.data, self.y, epochs=1, batch_size=self.batch, shuffle=False)

    def train_module(self) -> None:
        x, labels = torch.tensor(self.x), torch.tensor(self.y)
        state = torch.zeros(1, *self.module.shapes[-1])
        for start in range(0, ROWS, self.batch):
            outputs = []
            for row in x[start : start + self.batch].split(1):
                if self.carries:
                    y, state = self.module(row, state.detach())
                else:
                    y = self.module(row)
                outputs.append(y)
            self.optimizer.zero_grad()
            own = labels[start : start + self.batch]
            nn.functional.binary_cross_entropy(torch.cat(outputs), own).backward()
            self.optimizer.step()

    def largest_difference(self) -> float:
        """Return the largest difference between the weights of the file and the module."""
        own, names = dict(self.module.named_parameters()), self.trainer.state.weights
        pairs = ((names[n], w.detach().numpy()) for n, w in own.items() if n in names)
        return max(float(abs(a - b).max()) for a, b in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=[])
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    for name in given.names or NETWORKS:
        torch.manual_seed(0)
        turns = Turns(NETWORKS[name]())
        turns.train_file()
        turns.train_module()
        difference, times = turns.largest_difference(), ([], [])
        for _ in range(given.rounds):
            for kept, train in zip(times, (turns.train_file, turns.train_module), strict=True):
                begin = time.perf_counter()
                train()
                kept.append((time.perf_counter() - begin) / ROWS * 1e3)
        ours, theirs = map(median, times)
        print(
            f"{name:10} onnxgrad {ours:7.3f} ms a row, PyTorch {theirs:7.3f}: "
            f"{theirs / ours:5.1f} times as fast, weights differ by {difference:.0e}",
            flush=True,
        )


if __name__ == "__main__":
    main()
