"""What a drawn training must give: the same in PyTorch, in float64, batch by batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, optim
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import onnxgrad as og
from onnxgrad.training.run.runner import micro_batches
from tests.support.matrix_options import (
    CLASS_WEIGHT,
    EPS,
    RATE,
    Arrays,
    DrawnRows,
    Options,
    drawn_weights,
)

Step = Callable[[float], None]


class Lion(optim.Optimizer):
    """w <- w - lr (sign(b1 m + (1 - b1) g) + decay w);  m <- b2 m + (1 - b2) g."""

    def __init__(self, parameters: Any, lr: float = 1.0) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                p -= group["lr"] * ((0.9 * m + 0.1 * p.grad).sign() + 1e-3 * p)
                m.mul_(0.99).add_(0.01 * p.grad)


class Lamb(optim.Optimizer):
    """The step of AdamW, scaled to the norm lr |w|."""

    def __init__(self, parameters: Any, lr: float = 1.0) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                own = self.state[p]
                own["t"] = t = own.get("t", 0) + 1
                own["m"] = m = 0.9 * own.get("m", 0) + 0.1 * p.grad
                own["v"] = v = 0.999 * own.get("v", 0) + 0.001 * p.grad**2
                step = m / (1 - 0.9**t) / ((v / (1 - 0.999**t)).sqrt() + EPS) + 0.02 * p
                norms = p.norm(), step.norm()
                p -= group["lr"] * step * (norms[0] / norms[1] if min(norms) > 0 else 1.0)


def _muon(p: Tensor) -> optim.Optimizer:
    if p.ndim == 2:
        return optim.Muon([p], weight_decay=0.1)
    return optim.AdamW([p], eps=EPS)


OPTIMIZERS: dict[str, Callable[[Tensor], optim.Optimizer]] = {
    "sgd": lambda p: optim.SGD([p]),
    "momentum": lambda p: optim.SGD([p], momentum=0.9, weight_decay=0.02),
    "plain momentum": lambda p: optim.SGD([p], momentum=0.9),
    "nesterov": lambda p: optim.SGD([p], momentum=0.9, nesterov=True),
    "adam": lambda p: optim.Adam([p], eps=EPS),
    "amsgrad": lambda p: optim.Adam([p], eps=EPS, amsgrad=True, weight_decay=0.02),
    "adamw": lambda p: optim.AdamW([p], eps=EPS),
    "adamax": lambda p: optim.Adamax([p], eps=EPS),
    "nadam": lambda p: optim.NAdam([p], eps=EPS),
    "radam": lambda p: optim.RAdam([p], eps=EPS),
    "adagrad": lambda p: optim.Adagrad([p], eps=EPS, lr_decay=0.1),
    "adadelta": lambda p: optim.Adadelta([p], eps=EPS),
    "rmsprop": lambda p: optim.RMSprop([p], eps=EPS, momentum=0.8, centered=True),
    "plain rmsprop": lambda p: optim.RMSprop([p], eps=EPS),
    "rprop": lambda p: optim.Rprop([p], lr=RATE),
    "lion": lambda p: Lion([p]),
    "lamb": lambda p: Lamb([p]),
    "adafactor": lambda p: optim.Adafactor([p]),
    "muon": _muon,
}
SCHEDULE_FREE = {"schedule_free": "plain rmsprop", "schedule_free sgd": "sgd"}


@dataclass
class Update:
    """The update of one weight: an optimizer of torch, and what is around it."""

    p: Tensor
    name: str
    wrapper: str = ""
    factor: float = 1.0
    steps: int = 0
    total: float = 0.0
    largest: float = 0.0

    def __post_init__(self) -> None:
        base = SCHEDULE_FREE.get(self.name, self.name)
        self.free = base != self.name
        self.z = self.p.detach().clone() if self.free else self.p
        self.optimizer = OPTIMIZERS[base](self.z)
        self.average = self.p.detach().clone()
        if self.wrapper == "ema debiased":
            self.average.zero_()

    @torch.no_grad()
    def __call__(self, rate: float) -> None:
        """Take a step along the gradient of the weight."""
        self.steps += 1
        rate *= self.factor
        self.z.grad = self.p.grad
        if self.name != "rprop" or self.steps == 1:
            self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()
        t, a = self.steps, self.average
        if self.free:
            self.largest = max(self.largest, rate)
            self.total += self.largest**2
            a += (self.z - a) * (self.largest**2 / self.total if self.total else 0.0)
            self.p.copy_(0.1 * self.z + 0.9 * a)
        elif self.wrapper.startswith("ema"):
            a.mul_(0.7).add_(0.3 * self.p)
        elif self.wrapper == "swa" and t % 2 == 0:
            a += (self.p - a) / (t // 2)
        elif self.wrapper == "lookahead" and t % 3 == 0:
            a += 0.5 * (self.p - a)
            self.p.copy_(a)

    @property
    def evaluated(self) -> Tensor:
        """The weight to evaluate."""
        if self.wrapper == "ema debiased":
            return self.average / (1 - 0.7**self.steps)
        started = self.wrapper in ("ema", "lookahead") or (self.wrapper == "swa" and self.steps > 1)
        return self.average if self.free or started else self.p.detach()


@dataclass
class Witness:
    """The training of a draw in PyTorch."""

    options: Options
    validated: DrawnRows | None = None
    history: list[dict[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        options = self.options
        self.values = {n: torch.tensor(np.float64(a)) for n, a in drawn_weights(options).items()}
        self.updates = {}
        wrapper = "" if options.groups == "average" else options.wrapper
        for i, name in enumerate(options.trained):
            p = self.values[name].requires_grad_()
            own, factor, around = options.optimizer, 1.0, wrapper
            if options.groups and not i:
                own = options.optimizer if options.groups == "rate" else "plain momentum"
                factor = 0.5 if options.groups == "rate" else 1.0
                around = "ema" if options.groups == "average" else wrapper
            self.updates[name] = Update(p, own, around, factor)

    # -- the model --------------------------------------------------------------------------------

    def forward(self, values: dict[str, Tensor], x: Tensor, state: Any, training: bool) -> Tensor:
        """Return the prediction; new statistics are written to `values`."""
        v, options = values, self.options
        if options.dtype == "double":
            rows = torch.tanh(torch.einsum("nct,ctdu->ndu", x, v["w4"]))
            n = torch.tanh(torch.einsum("nct,ctu->ncu", rows, v["w3"]))
        else:
            image = functional.pad(x.reshape(-1, 2, 2, 2), (0, 1, 0, 1))
            rows = torch.tanh(functional.conv2d(image, v["w4"])).reshape(-1, 2, 4)
            n = torch.tanh(functional.conv1d(rows, v["w3"], padding=1))
        if options.batch_norm:
            moving = training and options.batch_norm == "train"
            n = functional.batch_norm(
                n, v["mean"], v["variance"], v["scale"], v["shift"], moving, 0.1
            )
        else:
            n = n * n
        z = (n.flatten(1) @ v["w2"] + v["w1"]) * v["w0"]
        return z + state if options.carry else z

    def carried(self, y: Tensor, state: Any) -> Any:
        """Return the state of the next batch."""
        if self.options.carry == "whole":
            return torch.tanh(y.detach()).mean(0, keepdim=True)
        return torch.tanh(y.detach()) if self.options.carry else state

    def loss(self, y: Tensor, batch: Arrays) -> tuple[Tensor, float]:
        """Return the sum of the terms of the loss, and their weight."""
        label = torch.tensor(batch["label"])
        if self.options.loss == "squared_error":
            terms = (y - label) ** 2
        else:
            terms = functional.cross_entropy(y, label.long(), reduction="none")
        weight = torch.ones(terms.shape, dtype=y.dtype)
        if self.options.weighted:
            own = torch.tensor(batch["weight"]).reshape(-1, *([1] * (terms.ndim - 1)))
            weight = weight * own
        elif self.options.weighting == "classes":
            weight = torch.tensor([CLASS_WEIGHT[i] for i in batch["label"]], dtype=y.dtype)
        counts = torch.ones_like(weight) if self.options.weighting == "signed rows" else weight
        return (terms * weight).sum(), counts.sum().item()

    # -- training ---------------------------------------------------------------------------------

    def clip(self) -> None:
        """Clip the gradients."""
        weights = [update.p for update in self.updates.values()]
        match self.options.clipping:
            case "norm":
                clip_grad_norm_(weights, 0.2)
            case "value" | "value inside":
                clip_grad_value_(weights, 0.05)
            case "each":
                for p in weights:
                    clip_grad_norm_([p], 0.1)

    def step(self, batch: Arrays, state: Any, rate: float) -> tuple[float, float, Any]:
        """Train on a batch; return the sum and the weight of its loss, and the new state."""
        options = self.options
        for update in self.updates.values():
            update.p.grad = torch.zeros_like(update.p)
        rows = len(batch["label"])
        parts, statistics = options.accumulate, options.batch_norm == "train"
        count = micro_batches(rows, parts, statistics) if parts > 1 else 1
        sums, totals = 0.0, 0.0
        for part in np.split(np.arange(rows), count):
            own = {n: a if n == "state" else a[part] for n, a in batch.items()}
            y = self.forward(self.values, torch.tensor(np.float64(own["x"])), state, True)
            total, weight = self.loss(y, own)
            total.backward()
            sums, totals = sums + total.item(), totals + weight
        for update in self.updates.values():
            update.p.grad /= totals
        self.clip()
        for update in self.updates.values():
            update(rate)
        return sums, totals, self.carried(y, state)

    def fit(self, rows: DrawnRows, steps: int) -> Witness:
        """Train as the options say."""
        options, done = self.options, 0
        rates = og.schedules.cosine(RATE, steps=steps, warmup=2)
        for epoch in range(options.epochs):
            order = None
            if options.shuffle:
                order = np.random.default_rng([5, epoch]).permutation(rows.count)
            sums, totals, state = 0.0, 0.0, None
            for batch in rows.batches(order):
                if state is None and options.carry:
                    state = torch.tensor(np.float64(batch["state"]))
                rate = RATE if options.schedule == "constant" else rates(done)
                added, weight, state = self.step(batch, state, rate)
                sums, totals, done = sums + added, totals + weight, done + 1
            entry = {"loss": sums / totals}
            if self.validated is not None:
                results, _ = self.evaluate(self.validated, self.evaluated)
                entry |= {f"validation_{name}": value for name, value in results.items()}
            self.history.append(entry)
        return self

    # -- results ----------------------------------------------------------------------------------

    @property
    def evaluated(self) -> dict[str, Tensor]:
        """The values to evaluate and export."""
        return self.values | {name: u.evaluated for name, u in self.updates.items()}

    @torch.no_grad()
    def evaluate(
        self, rows: DrawnRows, values: dict[str, Tensor]
    ) -> tuple[dict[str, float], np.ndarray]:
        """Return the loss and the metric for rows, and the predictions."""
        sums, totals, state, predictions, metric = 0.0, 0.0, None, [], []
        for batch in rows.batches():
            if state is None and self.options.carry:
                state = torch.tensor(np.float64(batch["state"]))
            y = self.forward(values, torch.tensor(np.float64(batch["x"])), state, False)
            total, weight = self.loss(y, batch)
            sums, totals, state = sums + total.item(), totals + weight, self.carried(y, state)
            predictions.append(y.numpy())
            if self.options.loss == "squared_error":
                metric += np.abs(y.numpy() - batch["label"]).ravel().tolist()
            else:
                metric += (y.numpy().argmax(axis=1) == batch["label"]).tolist()
        results = {"loss": sums / totals}
        if not self.options.weighted:
            name = "mae" if self.options.loss == "squared_error" else "accuracy"
            results[name] = float(np.mean(metric))
        return results, np.concatenate(predictions)
