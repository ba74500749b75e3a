"""Options of a training, drawn at random: the model, the data and the `Trainer` that they mean."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.utils.data import DataLoader, TensorDataset

import onnxgrad as og
from onnxgrad import optimizers as of
from onnxgrad.optimizers import Chain, Optimizer, ParamGroup, clip, clip_by_norm
from tests.support.models import add_initializers, parse_model

Arrays = dict[str, np.ndarray]
EPS = 1e-3  # of the optimizers that divide: without, they magnify the rounding of small gradients
SHAPES: dict[str, tuple[int, ...]] = {
    "w0": (),
    "w1": (3,),
    "w2": (8, 3),
    "w3": (2, 4, 4),
    "w4": (2, 4, 2, 4),
    "scale": (2,),
    "shift": (2,),
}
KERNELS = {"w3": (2, 2, 3), "w4": (2, 2, 2, 2)}  # of float32: onnxruntime has no Conv in float64
OPTIMIZERS: dict[str, Callable[[], Optimizer]] = {
    "sgd": of.sgd,
    "momentum": lambda: of.momentum(weight_decay=0.02),
    "nesterov": of.nesterov,
    "adam": lambda: of.adam(eps=EPS),
    "amsgrad": lambda: of.adam(eps=EPS, amsgrad=True, weight_decay=0.02),
    "adamw": lambda: of.adamw(eps=EPS),
    "adamax": lambda: of.adamax(eps=EPS),
    "nadam": lambda: of.nadam(eps=EPS),
    "radam": lambda: of.radam(eps=EPS),
    "adagrad": lambda: of.adagrad(eps=EPS, lr_decay=0.1),
    "adadelta": lambda: of.adadelta(eps=EPS),
    "rmsprop": lambda: of.rmsprop(eps=EPS, momentum=0.8, centered=True),
    "rprop": of.rprop,
    "lion": of.lion,
    "lamb": lambda: of.lamb(eps=EPS, weight_decay=0.02),
    "adafactor": of.adafactor,
    "muon": lambda: of.muon(other=of.adamw(eps=EPS)),
    "schedule_free": lambda: of.schedule_free(of.rmsprop(eps=EPS)),
    "schedule_free sgd": lambda: of.schedule_free(of.sgd()),
}
# the sign, or the direction, of a small gradient: in float32, rounding decides it
ROUGH = {"rprop", "lion", "adafactor", "muon"}
WRAPPERS: dict[str, Callable[[Optimizer], Optimizer]] = {
    "": lambda inner: inner,
    "ema": lambda inner: of.ema(inner, 0.7),
    "ema debiased": lambda inner: of.ema(inner, 0.7, debias=True),
    "swa": lambda inner: of.swa(inner, start=2, every=2),
    "lookahead": lambda inner: of.lookahead(inner, every=3),
}
IN_MEMORY = ("arrays", "dict", "memmap", "dataset", "parquet")
BATCHED = ("list", "tuple", "dicts", "tuple of dicts", "generator", "reused", "once", "loader")
UNCOUNTED = ("generator", "reused", "once")  # whose length is unknown before an epoch has ended
WITHOUT_STATES = ("memmap", "dataset", "parquet", "loader")  # what a state does not go into
VALIDATION = ("", "tuple", "list", "generator", "loader")
UNWEIGHTED = ("dicts", "tuple of dicts")


@dataclass(frozen=True)
class Options:
    """One draw; what its fields may be is in `draw_options`."""

    optimizer: str
    wrapper: str
    groups: str
    clipping: str
    accumulate: int
    batch_norm: str
    dropout: bool
    carry: str
    ranks: tuple[int, ...]
    dtype: str
    cast: bool
    loss: str
    weighting: str
    schedule: str
    kind: str
    shuffle: bool
    validation: str
    resume: str
    call: str
    recompute: str
    large: bool
    epochs: int
    rows: int
    batch_size: int

    @property
    def weighted(self) -> bool:
        """Return whether rows have weights, which may be negative."""
        return "rows" in self.weighting

    @property
    def trained(self) -> list[str]:
        """Return the names of the weights that train."""
        normalized = ["scale", "shift"] if self.batch_norm else []
        return [f"w{rank}" for rank in self.ranks] + normalized

    @property
    def refused(self) -> tuple[str, ...]:
        """Return what the error must name, where these options cannot go together."""
        if self.carry and self.shuffle and self.kind in IN_MEMORY:
            return ("shuffle=True",)
        if self.carry and self.validation == "share":
            return "carry", "order"
        if self.validation == "share" and self.kind not in ("arrays", "dict"):
            return "validation", "memory"
        if self.carry and self.accumulate > 1:
            return "carry", "accumulate"
        return ()


def draw_options(number: int) -> Options:
    """Return the options of a draw."""
    rng = np.random.default_rng([29, number])

    def one(*choices: Any, plain: float = 0.0) -> Any:
        """Return one of the choices, and the first with another probability `plain`."""
        return choices[0 if rng.random() < plain else rng.integers(len(choices))]

    optimizer = one(*OPTIMIZERS)
    averages = optimizer.startswith("schedule_free")
    carry = one("", "rows", "whole", plain=0.7)
    ranks = tuple(i for i in range(5) if rng.random() < 0.6) or (int(rng.integers(5)),)
    kind = one(*(k for k in (*IN_MEMORY, *BATCHED) if not carry or k not in WITHOUT_STATES))
    call = "fit" if kind == "once" else one("fit", "partial_fit", plain=0.8)
    plain_fit = call == "fit" and kind != "once"
    validation = one(*VALIDATION[: -1 if carry else None])
    if rng.random() < (0.4 if kind in ("arrays", "dict") and not carry else 0.05):
        validation = "share"
    loss = one("squared_error", "cross_entropy")
    weightings = ["", *(["rows"] if kind not in UNWEIGHTED else [])]
    weightings += ["classes"] if loss == "cross_entropy" else []
    batch_size = one(4, 5, 6)
    options = Options(
        optimizer=optimizer,
        wrapper="" if averages else one(*WRAPPERS, plain=0.4),
        groups=one("", "rate", "optimizer", *([] if averages else ["average"]), plain=0.5),
        clipping=one("", "norm", "value", "each", "value inside", plain=0.4),
        accumulate=one(1, 2, 3, plain=0.5),
        batch_norm=one("", "frozen", "train"),
        dropout=bool(rng.random() < 0.2),
        carry=carry,
        ranks=ranks,
        dtype=one("double") if optimizer in ROUGH else one("double", "float"),
        cast=bool(rng.random() < 0.2),
        loss=loss,
        weighting=one(*weightings, plain=0.5),
        schedule="constant" if not plain_fit else one("constant", "cosine", "steps", plain=0.4),
        kind=kind,
        shuffle=bool(kind in ("arrays", "dict") and rng.random() < 0.4),
        validation=validation if call == "fit" else "",
        resume="" if not plain_fit else one("", "step", "epoch", plain=0.5),
        call=call,
        recompute=one("none", "cheap", "all", plain=0.6),
        large=bool(rng.random() < 0.15),
        epochs=1 if kind == "once" else int(rng.integers(2, 4)),
        rows=batch_size * int(rng.integers(3, 6)) + (0 if carry == "rows" else one(0, 1, 2)),
        batch_size=batch_size,
    )
    # a loss without a lower bound magnifies the rounding of float32
    signed = options.weighting == "rows" and number % 2 and options.dtype == "double"
    return replace(options, weighting="signed rows") if signed else options


# -- the model ------------------------------------------------------------------------------------


def drawn_weights(options: Options) -> Arrays:
    """Return all weights of the model; those that do not train are constants."""
    rng, single = np.random.default_rng(0), options.dtype == "float"
    shapes = SHAPES | (KERNELS if single else {})
    arrays = {name: 0.6 * rng.standard_normal(shape) + 0.2 for name, shape in shapes.items()}
    arrays |= {"mean": rng.standard_normal(2), "variance": rng.random(2) + 0.5}
    dtype = np.float32 if single else np.float64
    return {name: np.asarray(a, np.float32).astype(dtype) for name, a in arrays.items()}


def drawn_model(options: Options) -> onnx.ModelProto:
    """Return a network with a normalization, and with weights of each rank.

    Those whose rank is not among `ranks` are there, and do not train.
    """
    kind, state = options.dtype, {"rows": "[N,3] state", "whole": "[1,3] state"}.get(options.carry)
    inputs = f"{kind}[N,2,4] x" + (f", {kind}{state}" if state else "")
    outputs = f"{kind}[N,3] y" + (f", {kind}{state} ".replace("state", "new") if state else "")
    norm = "BatchNormalization(t3, scale, shift, mean, variance)"
    products = (
        'c4 = Einsum<equation = "nct,ctdu->ndu">(x, w4)  t4 = Tanh(c4)',
        'c3 = Einsum<equation = "nct,ctu->ncu">(t4, w3)  t3 = Tanh(c3)',
    )
    convolutions = (
        "image = Constant<value_ints = [0, 2, 2, 2]>()  rows = Constant<value_ints = [0, 2, 4]>()",
        "i = Reshape(x, image)  c4 = Conv<pads = [0, 0, 1, 1]>(i, w4)  t4 = Tanh(c4)",
        "r = Reshape(t4, rows)  c3 = Conv<pads = [1, 1]>(r, w3)  t3 = Tanh(c3)",
    )
    lines = [
        *(products if kind == "double" else convolutions),
        "first = Constant<value_ints = [0]>()",
        f"n = {norm if options.batch_norm else 'Mul(t3, t3)'}  flat = Flatten(n)",
        "m = MatMul(flat, w2)  b = Add(m, w1)  z = Mul(b, w0)",
        {"rows": "y = Add(z, state)  new = Tanh(y)", "": "y = Identity(z)"}.get(options.carry)
        or "y = Add(z, state)  t = Tanh(y)  new = ReduceMean(t, first)",
    ]
    made = parse_model(f"g ({inputs}) => ({outputs}) {{ {' '.join(lines)} }}", opset=20)
    read = {name for node in made.graph.node for name in node.input}
    add_initializers(made, {n: a for n, a in drawn_weights(options).items() if n in read})
    return made


# -- the trainer ----------------------------------------------------------------------------------

RATE = 0.05
CLASS_WEIGHT = {0: 1.0, 1: 2.0, 2: 0.5}


def drawn_optimizer(options: Options) -> Optimizer:
    """Return the optimizer, with its groups, clipping and average."""
    made, first = OPTIMIZERS[options.optimizer](), options.trained[0]
    groups: dict[str, dict[str, Optimizer | ParamGroup]] = {
        "rate": {first: ParamGroup(rate=0.5)},
        "optimizer": {first: of.momentum()},
        "average": {first: of.ema(of.momentum(), 0.7)},
    }
    if options.groups:
        made = of.param_groups(groups[options.groups], default=made)
    inner = {"value inside": clip(0.05), "value": clip(0.05), "each": clip_by_norm(0.1)}
    if options.clipping == "value inside":
        made = Chain((inner[options.clipping], made))
    wrapper = "" if options.groups == "average" else options.wrapper
    made = WRAPPERS[wrapper](made)
    if options.clipping in ("value", "each"):
        made = Chain((inner[options.clipping], made))
    return made


def drawn_schedule(options: Options, steps: int) -> Any:
    """Return the learning rate: a number, or a schedule that knows its `steps` or learns them."""
    if options.schedule == "constant":
        return RATE
    known = options.schedule == "steps" or options.kind in UNCOUNTED
    return og.schedules.cosine(RATE, steps=steps if known else None, warmup=2)


def drawn_trainer(options: Options, steps: int, *callbacks: og.callbacks.Callback) -> og.Trainer:
    """Return a trainer of the model for a run of so many steps."""
    metric = "mae" if options.loss == "squared_error" else "accuracy"
    class_weight: Any = CLASS_WEIGHT if options.weighting == "classes" else None
    plain_mean: Any = {"weighted_mean": False} if options.weighting == "signed rows" else None
    return og.Trainer(
        drawn_model(options),
        {"y": options.loss} if options.carry else options.loss,
        optimizer=drawn_optimizer(options),
        learning_rate=drawn_schedule(options, steps),
        train=options.trained,
        clip_norm=0.2 if options.clipping == "norm" else None,
        accumulate=options.accumulate,
        batch_norm="train" if options.batch_norm == "train" else "frozen",
        dropout={"flat": 0.3} if options.dropout else None,
        class_weight={"y": class_weight} if options.carry and class_weight else class_weight,
        loss_options={"y": plain_mean} if options.carry and plain_mean else plain_mean,
        metrics=[] if options.weighted else [metric],
        batch_axes={"state": None} if options.carry == "whole" else None,
        carry={"state": "new"} if options.carry else None,
        recompute=options.recompute,
        callbacks=callbacks,
        seed=5,
    )


# -- the data -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DrawnRows:
    """Rows with labels and weights, in all forms that `fit` takes.

    With `cast`, they have another dtype than the inputs of the model.
    """

    options: Options
    seed: int
    chosen: tuple[int, ...] | None = None  # of all rows that are drawn

    @property
    def count(self) -> int:
        """The number of rows."""
        return len(self.arrays["x"])

    @cached_property
    def arrays(self) -> Arrays:
        """The rows as arrays; float32 holds their features."""
        options, rng = self.options, np.random.default_rng(self.seed)
        dtype = np.float64 if (options.dtype == "double") != options.cast else np.float32
        x = rng.standard_normal((options.rows, 2, 4)).astype(np.float32).astype(dtype)
        target = np.sin(x.reshape(-1, 8)[:, :3] + x.reshape(-1, 8)[:, 3:6])
        regression = options.loss == "squared_error"
        classes = target.argmax(axis=1).astype(np.int32 if options.cast else np.int64)
        found = {"x": x, "label": target if regression else classes}
        if options.carry:
            first = rng.standard_normal((1, 3)) if options.carry == "whole" else np.zeros((1, 3))
            rows = 1 if options.carry == "whole" else options.rows
            found["state"] = np.repeat(first.astype(np.float32).astype(dtype), rows, axis=0)
        if options.weighted:
            found["weight"] = rng.integers(1, 5, options.rows).astype(dtype)
        if options.weighting == "signed rows":
            found["weight"] -= 2  # some sums of batches are negative
        return found if self.chosen is None else self.take(found, np.array(self.chosen))

    def take(self, arrays: Arrays, rows: np.ndarray) -> Arrays:
        """Return some rows; a state without rows is in each choice."""
        whole = {"state"} if self.options.carry == "whole" else set()
        return {n: a if n in whole else a[rows] for n, a in arrays.items()}

    def batches(self, order: np.ndarray | None = None) -> list[Arrays]:
        """Return the rows in batches, in order or another one."""
        order, size = np.arange(self.count) if order is None else order, self.options.batch_size
        return [self.take(self.arrays, order[i : i + size]) for i in range(0, len(order), size)]

    def arguments(self, kind: str, folder: Path) -> dict[str, Any]:
        """Return the arguments of `fit` for the rows in a form."""
        own = self.arrays
        x, y, weight = self.features(own), own["label"], own.get("weight")
        weighted = {} if weight is None else {"sample_weight": weight}
        tensors = [torch.from_numpy(own[n]) for n in ("x", "label", "weight") if n in own]
        match kind:
            case "arrays":
                return {"X": x, "y": y, **weighted}
            case "dict":
                return {"X": {"x": own["x"]} | self.state(own), "y": {"label": y}, **weighted}
            case "memmap":
                mapped = np.memmap(folder / "x", own["x"].dtype, "w+", shape=own["x"].shape)
                mapped[:] = own["x"]
                return {"X": mapped, "y": y, **weighted}
            case "dataset":
                return {"X": TensorDataset(*tensors)}
            case "parquet":
                names = {"y": "label"} | ({} if weight is None else {"sample_weight": "weight"})
                return {"X": self.parquet(folder / "rows.parquet"), **names}
            case "loader":
                return {"X": DataLoader(TensorDataset(*tensors), self.options.batch_size)}
            case "list":
                return {"X": list(self.pairs())}
            case "tuple":
                return {"X": tuple(self.pairs())}
            case "dicts" | "tuple of dicts":
                container = list if kind == "dicts" else tuple
                return {"X": container(self.batches())}
            case "generator":
                return {"X": self.pairs}
            case "reused":
                return {"X": self.overwritten}
            case "once":
                return {"X": self.pairs()}
        raise AssertionError(kind)

    def state(self, arrays: Arrays) -> Arrays:
        """Return the state among some arrays, if the model has one."""
        return {"state": arrays["state"]} if self.options.carry else {}

    def features(self, arrays: Arrays) -> Any:
        """Return what the model reads of some arrays, an array where that is all."""
        return {"x": arrays["x"]} | self.state(arrays) if self.options.carry else arrays["x"]

    def pairs(self) -> Iterator[tuple[Any, ...]]:
        """Yield batches (X, y) or (X, y, sample_weight)."""
        for batch in self.batches():
            weight = (batch["weight"],) if "weight" in batch else ()
            yield (self.features(batch), batch["label"], *weight)

    def overwritten(self) -> Iterator[tuple[Any, ...]]:
        """Yield the same, in memory that the next batch is written to."""
        memory: Arrays = {}
        for batch in self.pairs():
            features = batch[0] if isinstance(batch[0], dict) else {"": batch[0]}
            named = features | {f"part {i}": part for i, part in enumerate(batch[1:])}
            for name, array in named.items():
                memory.setdefault(name, np.zeros_like(array))[: len(array)] = array
            own = {name: memory[name][: len(array)] for name, array in named.items()}
            rest = [own.pop(f"part {i}") for i in range(len(batch) - 1)]
            yield (own if isinstance(batch[0], dict) else own[""], *rest)

    def parquet(self, path: Path) -> Path:
        """Write the rows to a file, with arrays as lists of fixed sizes; not a second time."""
        if path.exists():  # a checkpoint is of the file as it was
            return path
        columns = {}
        for name, array in self.arrays.items():
            column = pa.array(array.ravel())
            for length in reversed(array.shape[1:]):
                column = pa.FixedSizeListArray.from_arrays(column, length)
            columns[name] = column
        pq.write_table(pa.table(columns), path, row_group_size=7)
        return path
