"""Step of a generator whose loss is a frozen .onnx encoder: in PyTorch by OnnxModule and by
onnx2torch, and in a Trainer.

python benchmarks/frozen_loss.py [dnsmos] [resnet] [--rounds 5]

`dnsmos` maximizes a predicted quality of speech (DNSMOS, 9 s of sound); `resnet` compares features
of images (a ResNet-50, 224 x 224) at the prediction and at the label. Both files ship in wheels:
see `published.py`. onnx2torch turns them into modules of PyTorch; `pip install onnx2torch`. The
columns of the tools are ratios: the time of a step with onnx2torch, over the time with the tool.
The errors are of the loss and of the generator's gradient, relative to PyTorch in float64, the
larger of both. `taskset -c 0` restricts all to one core.
"""

from __future__ import annotations

import argparse
import io
import os
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import onnx
import torch
from common import commit, ratio, turns
from published import fetched
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import onnxgrad as og
from onnxgrad.torch import OnnxModule

SAMPLES = 144160  # of DNSMOS
STEPS = 2  # of a call of a trainer
SCALE = 127.5  # from pixels of -1 to 1 to those of the encoder
FEATURES = ("Relu_9:0", "Relu_21:0", "Relu_39:0")  # behind three stages of the ResNet


class Enhancer(nn.Module):
    """Removes noise from sounds (N, samples)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, 16, 31, padding=15)
        self.last = nn.Conv1d(16, 1, 31, padding=15)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(self.first(x[:, None]).tanh())[:, 0]


class Painter(nn.Module):
    """Changes images (N, 224, 224, 3), whose channels come last as in the encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.last = nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = x.permute(0, 3, 1, 2)
        return (y + self.last(self.first(y).relu())).tanh().permute(0, 2, 3, 1)


@dataclass
class Case:
    """A generator, its data, a frozen encoder, and the loss in PyTorch and in onnxgrad."""

    generator: nn.Module
    x: Tensor
    target: Tensor | None
    encoder: onnx.ModelProto
    torch_loss: Callable[[nn.Module, Tensor, Tensor | None], Tensor]
    onnx_loss: Any


def score_loss(encoder: nn.Module, y: Tensor, target: Tensor | None) -> Tensor:
    return -encoder(y)[:, 2].mean()


def dnsmos() -> Case:
    encoder = onnx.load(fetched("dnsmos"))
    torch.manual_seed(0)
    loss = og.losses.LossModel(
        encoder,
        inputs={encoder.graph.input[0].name: "y"},
        formula=lambda op, mos: -op.Gather(mos, [2], axis=1),
    )
    return Case(Enhancer(), 0.1 * torch.randn(1, SAMPLES), None, encoder, score_loss, loss)


def feature_loss(encoder: nn.Module, y: Tensor, target: Tensor | None) -> Tensor:
    assert target is not None
    with torch.no_grad():
        wanted = encoder(target * SCALE)
    mine = encoder(y * SCALE)
    terms = [nn.functional.mse_loss(a, b) for a, b in zip(mine, wanted, strict=True)]
    return nn.functional.l1_loss(y, target) + 0.1 * torch.stack(terms).sum()


def resnet(rows: int = 4) -> Case:
    encoder = og.graph.select_model_inputs_outputs(onnx.load(fetched("opennsfw")), FEATURES)
    torch.manual_seed(0)
    small = torch.rand(rows, 3, 14, 14) * 2 - 1
    target = nn.functional.interpolate(small, (224, 224), mode="bilinear").permute(0, 2, 3, 1)
    loss = og.losses.perceptual_loss(
        encoder,
        list(FEATURES),
        loss="absolute_error",
        factor=0.1,
        preprocess=lambda op, x: x * SCALE,
    )
    target = target.contiguous()
    noisy = target + 0.3 * torch.randn_like(target)
    return Case(Painter(), noisy, target, encoder, feature_loss, loss)


CASES = {"dnsmos": dnsmos, "resnet": resnet}


def as_onnx(generator: nn.Module, x: Tensor) -> onnx.ModelProto:
    """Return the generator in ONNX, of any number of rows."""
    file = io.BytesIO()
    names = {
        "input_names": ["x"],
        "output_names": ["y"],
        "dynamic_axes": {"x": {0: "N"}, "y": {0: "N"}},
    }
    torch.onnx.export(generator, (x,), file, dynamo=False, **names)
    return onnx.load_model_from_string(file.getvalue())


def torch_step(case: Case, encoder: nn.Module) -> tuple[float, dict[str, np.ndarray]]:
    """Return the loss, and the gradients of the generator's weights by name."""
    case.generator.zero_grad()
    loss = case.torch_loss(encoder, case.generator(case.x), case.target)
    loss.backward()
    gradients = {n: p.grad.numpy().copy() for n, p in case.generator.named_parameters()}
    return loss.item(), gradients


def in_double(case: Case) -> Case:
    """Return a copy of the case in float64."""
    double = None if case.target is None else case.target.double()
    return replace(
        case, generator=deepcopy(case.generator).double(), x=case.x.double(), target=double
    )


def new_trainer(case: Case, model: onnx.ModelProto, rate: float = 1e-3) -> og.Trainer:
    return og.Trainer(model, case.onnx_loss, optimizer="sgd", learning_rate=rate)


def train(case: Case, trainer: og.Trainer, steps: int) -> None:
    """Train on the rows of the case, `steps` times."""
    arrays = [t.numpy() for t in (case.x, case.target) if t is not None]
    batches = [tuple(arrays) if len(arrays) > 1 else (arrays[0],)] * steps
    trainer.fit(batches, epochs=1, shuffle=False)


def trainer_step(
    case: Case, model: onnx.ModelProto, size: float
) -> tuple[float, dict[str, np.ndarray]]:
    """Return the loss and the gradients of a trainer; their largest element is about `size`.

    The gradients are the change of the weights, which is large enough not to be rounded away.
    """
    trainer = new_trainer(case, model, 1 / size)
    train(case, trainer, 1)
    start = {n: p.detach().numpy() for n, p in case.generator.named_parameters()}
    gradients = {n: (start[n] - trainer.state.weights[n]) * size for n in start}
    return trainer.history[0]["loss"], gradients


def error(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """Return the length of the difference of two gradients, relative to the expected gradient."""
    pairs = [(found[n].astype(np.float64), expected[n].astype(np.float64)) for n in expected]
    off = sum(np.square(a - b).sum() for a, b in pairs)
    return float(np.sqrt(off / sum(np.square(b).sum() for _, b in pairs)))


def measured(name: str, rounds: int, table: Table) -> None:
    """Add the row of a case to the table."""
    from onnx2torch import convert

    case = CASES[name]()
    model = as_onnx(case.generator, case.x)
    onnx_module = OnnxModule(case.encoder, trainable=[])
    torch_module = convert(case.encoder).eval().requires_grad_(False)
    loss, expected = torch_step(in_double(case), deepcopy(torch_module).double())
    found = [torch_step(case, torch_module), torch_step(case, onnx_module)]
    found.append(trainer_step(case, model, max(np.abs(g).max() for g in expected.values())))
    errors = [max(abs(own / loss - 1), error(gradients, expected)) for own, gradients in found]
    seconds = turns(
        {
            "onnx2torch": partial(torch_step, case, torch_module),
            "OnnxModule": partial(torch_step, case, onnx_module),
            "Trainer": partial(train, case, new_trainer(case, model), STEPS),
        },
        rounds,
    )
    seconds["Trainer"] = [s / STEPS for s in seconds["Trainer"]]
    base = seconds["onnx2torch"]
    table.add_row(
        name,
        f"{1000 * median(base):.0f}",
        *(ratio(base, seconds[tool]) for tool in ("OnnxModule", "Trainer")),
        *(f"{e:.0e}" for e in errors),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=list(CASES))
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(cores := len(os.sched_getaffinity(0)))
    title = f"commit {commit()}, {cores} cores, PyTorch {torch.__version__}"
    errors = [f"error, {tool}" for tool in ("onnx2torch", "OnnxModule", "Trainer")]
    columns = "onnx2torch, ms", "OnnxModule", "Trainer", *errors
    table = Table("encoder", *columns, title=title)
    for name in given.cases:
        measured(name, given.rounds, table)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
