"""A weather model of the form of Pangu-Weather: its file, its training in onnxgrad and in PyTorch.

python benchmarks/weather.py [small] [wide] [fine] [--tools onnxgrad PyTorch] [--folder FOLDER]

The network embeds patches of fields on pressure levels and at the surface, and has blocks of
attention in three-dimensional windows, every second one shifted, with a bias for each pressure
level and latitude (Bi et al. 2023), at two resolutions. The forms differ in what takes memory:
`wide` has weights of 1.5 GB in external data, and `fine` has many windows. What trains is all
weights, adapters in all blocks, or adapters in the last blocks only. onnxgrad alone also trains
files in float16, and with the results of frozen blocks computed once. Each training is measured in
a process of its own: seconds of a step, and the peak of its resident memory.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from onnxgrad.model.convert import convert_precision

UPPER, SURFACE = 5, 4  # variables on each pressure level, and at the surface
PATCH = (2, 4, 4)  # levels, latitudes, longitudes
PROJECTIONS = ["*.attention.qkv.weight", "*.attention.project.weight"]
INPUTS, OUTPUTS = ["input", "input_surface"], ["output", "output_surface"]


@dataclass(frozen=True)
class Form:
    """Sizes of a model. `grid` counts levels, latitudes and longitudes of the fields."""

    grid: tuple[int, int, int]
    width: int
    heads: tuple[int, int]
    depths: tuple[int, int]
    window: tuple[int, int, int] = (2, 6, 12)


FORMS = {
    "tiny": Form((5, 22, 48), 8, (2, 4), (1, 2), (2, 3, 6)),
    "small": Form((5, 45, 96), 24, (6, 12), (2, 2)),
    "wide": Form((5, 45, 96), 768, (6, 12), (2, 6)),
    "fine": Form((13, 141, 288), 192, (6, 12), (2, 6)),
}

Sizes = tuple[int, int, int]


def window_positions(window: Sizes) -> Tensor:
    """Return the index of the bias of each pair of positions in a window, (T, T): absolute along
    levels and latitudes, relative along longitudes.
    """
    axes = [torch.arange(n) for n in window]
    z, h, w = (x.flatten() for x in torch.meshgrid(*axes, indexing="ij"))
    levels, latitudes, longitudes = window
    column = w[:, None] - w[None] + longitudes - 1
    row = h[:, None] + h[None] * latitudes
    level = z[:, None] + z[None] * levels
    return column + (2 * longitudes - 1) * (row + latitudes**2 * level)


class EarthAttention(nn.Module):
    """Attention in windows, with a bias for each place of a window on the earth."""

    def __init__(self, width: int, heads: int, window: Sizes, places: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        entries = (2 * window[2] - 1) * (window[1] * window[0]) ** 2
        self.earth_bias = nn.Parameter(0.02 * torch.randn(entries, places, heads))
        self.register_buffer("positions", window_positions(window), persistent=False)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Return the attention of windows x, (N, places, T, width)."""
        _, places, count, width = x.shape
        q, k, v = (
            self.qkv(x).reshape(-1, places, count, 3, self.heads, width // self.heads)
        ).permute(3, 0, 1, 4, 2, 5)
        scores = (q * (width // self.heads) ** -0.5) @ k.transpose(-1, -2)
        bias = self.earth_bias[self.positions.flatten()]
        bias = bias.reshape(count, count, places, self.heads).permute(2, 3, 0, 1)
        scores = scores + bias
        if mask is not None:
            scores = scores + mask[:, None]
        y = scores.softmax(-1) @ v
        return self.project(y.transpose(2, 3).reshape(-1, places, count, width))


class EarthBlock(nn.Module):
    """Attention and a perceptron on a grid, each with a norm of its result."""

    def __init__(self, width: int, heads: int, grid: Sizes, window: Sizes, shifted: bool) -> None:
        super().__init__()
        self.grid, self.window, self.width = grid, window, width
        self.counts = tuple(a // b for a, b in zip(grid, window, strict=True))
        self.shift = tuple(b // 2 for b in window) if shifted else (0, 0, 0)
        places = self.counts[0] * self.counts[1]
        self.attention = EarthAttention(width, heads, window, places)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.register_buffer("mask", self.shift_mask() if shifted else None, persistent=False)

    def shift_mask(self) -> Tensor:
        """Return -100 for pairs of a shifted window that are no neighbors, (places, T, T).

        Longitudes are a circle, so that they have no borders.
        """
        region = torch.zeros(self.grid)
        for axis in (0, 1):
            part = torch.zeros(self.grid[axis])
            part[-self.window[axis] :] = 1
            part[-self.shift[axis] :] = 2
            shape = [-1 if i == axis else 1 for i in range(3)]
            region = 3 * region + part.reshape(shape)
        rows = self.split(region[None, ..., None])[0, :, :, 0]
        return -100.0 * (rows[:, None] != rows[:, :, None]).float()

    def split(self, x: Tensor) -> Tensor:
        """Return the windows (N, places, T, width) of fields (N, levels, latitudes, ...)."""
        (a, b, c), (i, j, k) = self.counts, self.window
        windows = x.reshape(-1, a, i, b, j, c, k, x.shape[-1]).permute(0, 5, 1, 3, 2, 4, 6, 7)
        return windows.reshape(-1, a * b, i * j * k, x.shape[-1])

    def join(self, windows: Tensor) -> Tensor:
        """Return the fields of the windows of `split`."""
        (a, b, c), (i, j, k) = self.counts, self.window
        x = windows.reshape(-1, c, a, b, i, j, k, self.width).permute(0, 2, 4, 3, 5, 1, 6, 7)
        return x.reshape(-1, *self.grid, self.width)

    def forward(self, x: Tensor) -> Tensor:
        y, axes = x, (1, 2, 3)
        if any(self.shift):
            y = torch.roll(y, [-s for s in self.shift], axes)
        y = self.join(self.attention(self.split(y), self.mask))
        if any(self.shift):
            y = torch.roll(y, list(self.shift), axes)
        x = x + self.norm1(y)
        return x + self.norm2(self.mlp(x))


class Downsample(nn.Module):
    """Joins 2 x 2 latitudes and longitudes."""

    def __init__(self, width: int, grid: Sizes) -> None:
        super().__init__()
        self.grid, self.norm = grid, nn.LayerNorm(4 * width)
        self.linear = nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        z, h, w = self.grid
        x = x.reshape(-1, z, h // 2, 2, w // 2, 2, x.shape[-1]).permute(0, 1, 2, 4, 3, 5, 6)
        return self.linear(self.norm(x.flatten(4)))


class Upsample(nn.Module):
    """Splits each place into 2 x 2 latitudes and longitudes."""

    def __init__(self, width: int, grid: Sizes) -> None:
        super().__init__()
        self.grid, self.norm = grid, nn.LayerNorm(width)
        self.first = nn.Linear(2 * width, 4 * width, bias=False)
        self.last = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        z, h, w = self.grid
        y = self.first(x).reshape(-1, z, h // 2, w // 2, 2, 2, x.shape[-1] // 2)
        y = y.permute(0, 1, 2, 4, 3, 5, 6).reshape(-1, z, h, w, x.shape[-1] // 2)
        return self.last(self.norm(y))


class Weather(nn.Module):
    """Fields of the next hour from fields: on levels (N, 5, Z, H, W), and at the surface."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form
        self.padded = tuple(-(-n // p) * p for n, p in zip(form.grid, PATCH, strict=True))
        z, h, w = (n // p for n, p in zip(self.padded, PATCH, strict=True))
        grid, coarse, c = (z + 1, h, w), (z + 1, h // 2, w // 2), form.width
        self.embed = nn.Conv3d(UPPER, c, PATCH, PATCH)
        self.embed_surface = nn.Conv2d(SURFACE, c, PATCH[1:], PATCH[1:])

        def layer(places: Sizes, half: int) -> nn.Sequential:
            sizes = c << half, form.heads[half], places, form.window
            return nn.Sequential(
                *(EarthBlock(*sizes, shifted=i % 2 == 1) for i in range(form.depths[half]))
            )

        self.layer1, self.layer4 = layer(grid, 0), layer(grid, 0)
        self.layer2, self.layer3 = layer(coarse, 1), layer(coarse, 1)
        self.down, self.up = Downsample(c, grid), Upsample(c, grid)
        self.recover = nn.ConvTranspose3d(2 * c, UPPER, PATCH, PATCH)
        self.recover_surface = nn.ConvTranspose2d(2 * c, SURFACE, PATCH[1:], PATCH[1:])

    def forward(self, upper: Tensor, surface: Tensor) -> tuple[Tensor, Tensor]:
        levels, height, width = self.form.grid
        more = [a - b for a, b in zip(self.padded, self.form.grid, strict=True)]
        sides = [0, more[2], 0, more[1], 0, more[0]]
        above = self.embed(functional.pad(upper, sides))
        below = self.embed_surface(functional.pad(surface, sides[:4]))
        x = torch.cat([below[:, :, None], above], 2).permute(0, 2, 3, 4, 1)
        skip = self.layer1(x)
        x = self.layer4(self.up(self.layer3(self.layer2(self.down(skip)))))
        y = torch.cat([skip, x], -1).permute(0, 4, 1, 2, 3)
        recovered = self.recover(y[:, :, 1:])[:, :, :levels, :height, :width]
        return recovered, self.recover_surface(y[:, :, 0])[:, :, :height, :width]


def new_model(name: str) -> Weather:
    """Return a model with random weights, always the same.

    No two are equal, as of a trained model: the exporter would write equal weights once.
    """
    torch.manual_seed(0)
    model = Weather(FORMS[name]).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:
                p += 0.02 * torch.randn_like(p)
    return model


def fields(name: str, rows: int = 1, seed: int = 0) -> dict[str, np.ndarray]:
    """Return smooth random fields, for inputs and labels, by name."""
    levels, height, width = FORMS[name].grid
    rng, made = np.random.default_rng(seed), {}
    for part in (*INPUTS, *(f"label_{y}" for y in OUTPUTS)):
        shape = (rows, SURFACE) if part.endswith("surface") else (rows, UPPER, levels)
        coarse = torch.tensor(rng.standard_normal((1, np.prod(shape), 6, 12), np.float32))
        smooth = functional.interpolate(coarse, (height, width), mode="bilinear")
        made[part] = smooth.reshape(*shape, height, width).numpy()
    return made


def loss_of(model: Weather, data: dict[str, np.ndarray]) -> Tensor:
    """Return the loss of Pangu-Weather: absolute errors, those at the surface times 0.25."""
    found = model(*(torch.tensor(data[name]) for name in INPUTS))
    upper, surface = (
        functional.l1_loss(y, torch.tensor(data[f"label_{name}"]))
        for y, name in zip(found, OUTPUTS, strict=True)
    )
    return upper + 0.25 * surface


def write_file(name: str, path: Path) -> None:
    """Write a model to `path`, its data beside it."""
    example = tuple(torch.tensor(fields(name)[part]) for part in INPUTS)
    rows = {part: {0: "N"} for part in (*INPUTS, *OUTPUTS)}
    with tempfile.TemporaryDirectory(dir=path.parent) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = Path(folder, "exported.onnx")
        torch.onnx.export(
            new_model(name), example, exported, dynamo=False, input_names=INPUTS,
            output_names=OUTPUTS, dynamic_axes=rows, do_constant_folding=False,
        )  # fmt: skip
        model = onnx.load(exported)
    onnx.save(model, path, save_as_external_data=True, location=f"{path.name}.data")


# -- trainings, each in a process of its own ------------------------------------------------------

RANK, STEPS = 8, 3
JOBS = {  # what trains and how, and the options of a trainer and of `fit`
    ("all", "none"): {},
    ("all", "recompute"): {"recompute": "all"},
    ("adapters", "none"): {},
    ("adapters", "recompute"): {"recompute": "all"},
    ("adapters", "float16"): {},
    ("adapters", "float16, mixed"): {"precision": "mixed"},
    ("last adapters", "none"): {},
    ("last adapters", "cache"): {"cache": True},
}


class LowRank(nn.Module):
    """A frozen layer with an adapter beside it."""

    def __init__(self, layer: nn.Linear, scale: float = 1.0) -> None:
        super().__init__()
        self.layer, self.scale = layer.requires_grad_(False), scale
        self.a = nn.Parameter(torch.randn(layer.in_features, RANK) / layer.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(RANK, layer.out_features))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + x @ self.a @ self.b * self.scale


def add_adapters(model: Weather, part: nn.Module) -> None:
    """Put an adapter beside each projection of the attentions of a part, and freeze all else."""
    model.requires_grad_(False)
    for module in [m for m in part.modules() if isinstance(m, EarthAttention)]:
        module.qkv, module.project = LowRank(module.qkv), LowRank(module.project)


def recompute_blocks(model: Weather) -> None:
    """Compute each block again in the backward pass."""
    for block in (m for m in model.modules() if isinstance(m, EarthBlock)):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore


def peak_gigabytes() -> float:
    """Return the peak of this process's resident memory; mapped files count where they are read."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1e6


def train_by_torch(name: str, trained: str, how: str) -> dict[str, Any]:
    """Train in PyTorch; return the times of the steps' ends, and the losses."""
    model, ends, losses = new_model(name), [], []
    if trained != "all":
        add_adapters(model, model if trained == "adapters" else model.layer4)
    if how == "recompute":
        recompute_blocks(model)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-4)
    data = fields(name)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, data)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        ends.append(time.perf_counter())
    return {"ends": ends, "losses": losses}


def write_half(path: Path) -> Path:
    """Write the model at `path` with float16 in place of float32; return the path of the file."""
    made = path.with_name("half.onnx")
    half = convert_precision(onnx.load(path), ir.DataType.FLOAT16)
    onnx.save(half, made, save_as_external_data=True, location=f"{made.name}.data")
    return made


def train_by_trainer(path: Path, name: str, trained: str, how: str) -> dict[str, Any]:
    """Train in onnxgrad; return the times of the steps' ends, and the losses."""
    import onnxgrad as og

    ends: list[float] = []

    class Clock(og.callbacks.Callback):
        def on_step_end(self, trainer, state, control):
            ends.append(time.perf_counter())

    data, options = fields(name), dict(JOBS[trained, how])
    fit_options = {key: options.pop(key) for key in ("cache",) if key in options}
    if how.startswith("float16"):
        data = {key: x.astype(np.float16) for key, x in data.items()}
    patterns = PROJECTIONS if trained == "adapters" else [f"layer4.{p}" for p in PROJECTIONS]
    trainer = og.Trainer(
        path if trained == "all" else og.add_lora(path, patterns, rank=RANK, alpha=RANK),
        dict.fromkeys(OUTPUTS, "mae"),
        loss_weights={"output_surface": 0.25},
        optimizer="adam",
        learning_rate=1e-4,
        callbacks=[Clock()],
        **options,
    )
    trainer.fit(data, epochs=STEPS, batch_size=1, **fit_options)
    losses = [entry["loss"] for entry in trainer.history]
    trainer.save(path.with_name("trained.onnx"))
    return {"ends": ends, "losses": losses}


def job(tool: str, path: str, name: str, trained: str, how: str) -> dict[str, Any]:
    """Return the seconds of a step, the peak of memory and the losses of a training."""
    if tool == "PyTorch":
        found = train_by_torch(name, trained, how)
    else:
        found = train_by_trainer(Path(path), name, trained, how)
    seconds = float(np.median(np.diff(found["ends"])))
    return {"seconds": seconds, "peak": peak_gigabytes(), "losses": found["losses"]}


def child(*arguments: str) -> dict[str, Any] | str:
    """Return what a process of its own measures, or its error."""
    command = [sys.executable, "-W", "ignore", __file__, "--job", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return (done.stderr.strip().splitlines() or [str(done.returncode)])[-1]
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("forms", nargs="*", default=["small", "wide", "fine"])
    parser.add_argument("--tools", nargs="*", default=["onnxgrad", "PyTorch"])
    parser.add_argument("--folder", type=Path, help="where the files are written, then removed")
    parser.add_argument("--job", nargs=5, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.job:
        print(json.dumps(job(*given.job)))
        return
    table = Table("form", "GB", "trained", "how", "tool", "s a step", "peak, GB", "last loss")
    for name in given.forms:
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            path = Path(folder, "weather.onnx")
            write_file(name, path)
            half = write_half(path)
            for (trained, how), tool in itertools.product(JOBS, given.tools):
                if tool == "PyTorch" and how not in ("none", "recompute"):
                    continue
                file = half if how.startswith("float16") else path
                size = (file.stat().st_size + Path(f"{file}.data").stat().st_size) / 1e9
                found = child(tool, str(file), name, trained, how)
                cells = [found]
                if not isinstance(found, str):
                    cells = [f"{found['seconds']:.2f}", f"{found['peak']:.2f}"]
                    cells.append(f"{found['losses'][-1]:.6f}")
                row = name, f"{size:.2f}", trained, how, tool, *cells
                table.add_row(*row)
                print(*row, flush=True)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
