"""What trains by default, against the parameters of the networks that were exported."""

from __future__ import annotations

import contextlib
import functools
import io
import warnings
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

from onnxgrad import trainable  # noqa: E402
from onnxgrad.model.weights import constant_refs  # noqa: E402
from tests.support.networks_more import NETWORKS  # noqa: E402

LEVELS = {
    "plain": None,
    "basic": ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
}
SCALARS = {  # learned ones, under all of their names
    "logit_scale", "exp", "/Exp_output_0", "temperature", "logit_bias", "scale", "alpha",
    "alphas.0", "alphas.1",
}  # fmt: skip
NAMELESS = {"query_embed.weight", "cls_token", "bn1.bias"}  # expanded or folded
FIXED_LENGTH = {"alibi table", "lstm", "gru", "gru, learned state", "rnn"}  # of their second axis


def network(name):
    """Return a network whose parameters are all random, and its inputs."""
    torch.manual_seed(0)
    net, inputs = NETWORKS[name]()
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(0.3 * torch.randn(p.shape) + (0.7 if p.numel() < 3 else 0.0))
    return net.eval(), inputs


@functools.cache
def exported(name: str, dynamo: bool) -> bytes:
    net, inputs = network(name)
    names = [f"x{i}" for i in range(len(inputs))]
    moving = [
        {0: "N", 1: "T"} if x.dtype == torch.int64 and x.ndim > 1 and name not in FIXED_LENGTH
        else {0: "N"}
        for x in inputs
    ]  # fmt: skip
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        if not dynamo:
            file = io.BytesIO()
            axes = dict(zip(names, moving, strict=True))
            torch.onnx.export(net, inputs, file, dynamo=False, input_names=names, dynamic_axes=axes)
            return file.getvalue()
        sizes = tuple(dict.fromkeys(axes, torch.export.Dim.DYNAMIC) for axes in moving)
        program = torch.onnx.export(
            net, inputs, dynamo=True, verbose=False, input_names=names, dynamic_shapes=sizes
        )
        return program.model_proto.SerializeToString()


def optimized(model: bytes, level: str, folder: Path) -> onnx.ModelProto:
    if LEVELS[level] is None:
        return onnx.load_from_string(model)
    options = ort.SessionOptions()
    options.graph_optimization_level = LEVELS[level]
    options.optimized_model_filepath = str(folder / f"{level}.onnx")
    options.log_severity_level = 4
    ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return onnx.load(options.optimized_model_filepath)


def elements(tensors) -> set[float]:
    return {x for t in tensors if t.is_floating_point() for x in t.detach().ravel().tolist()}


def learned(net, model: onnx.ModelProto) -> set[str]:
    """Return the names of what the parameters of `net` became in `model`.

    They are random: what holds one number only, whole numbers, or elements of buffers, is of none.
    Single numbers are parameters, or their e^p.
    """
    buffers = elements(net.buffers())
    single = [p.detach() for p in net.parameters() if p.numel() == 1]
    single = elements(single) | elements(p.exp() for p in single)
    names = set()
    for site in constant_refs(model):
        array = site.array()
        if array.dtype.kind != "f":
            continue
        values = set(array.ravel().tolist())
        formula = len(values) == 1 or all(map(float.is_integer, values)) or values <= buffers
        if values <= single if array.size == 1 else not formula:
            names.add(site.name)
    return names


def exports() -> list:
    """Return every network with both exporters; most of them are of the sweep."""
    marks = pytest.mark.sweep
    return [
        pytest.param(name, dynamo, id=f"{name}-{exporter}", marks=[marks] * (i % rare != 0))
        for exporter, dynamo, rare in (("legacy", False, 2), ("dynamo", True, 4))
        for i, name in enumerate(NETWORKS)
    ]


def wrong_aliases(net, model: onnx.ModelProto, complete: bool) -> dict[str, str]:
    """Return the aliases that are not those of the parameters with the same numbers.

    With `complete`, each tensor that is a moved parameter needs one, other than what the exporter
    computed from several nodes (`NAMELESS`). The TorchScript exporter leaves out modules of which
    a method other than `forward` is called: then the alias is the end of the name.
    """
    numbers = {n: np.sort(p.detach().numpy().ravel()) for n, p in net.named_parameters()}
    arrays = {ref.name: ref.array() for ref in constant_refs(model)}
    wrong = {}
    for t in trainable(model).trained:
        if t.name in numbers or t.copy_of:
            continue
        array = np.sort(arrays[t.name].ravel())
        same = {n for n, values in numbers.items() if np.array_equal(values, array)} - NAMELESS
        fits = any(t.alias and f".{n}".endswith(f".{t.alias}") for n in same)
        if same and not fits and (complete or t.alias in numbers):
            wrong[t.name] = t.alias
        elif not same and t.alias in numbers and t.size % numbers[t.alias].size:
            wrong[t.name] = t.alias  # not even folded into one with a normalization
    return wrong


@pytest.mark.parametrize(("name", "dynamo"), exports())
def test_as_named_parameters(name, dynamo, tmp_path):
    net, _ = network(name)
    model = exported(name, dynamo)
    for level in LEVELS:
        rows = trainable(proto := optimized(model, level, tmp_path))
        expected = learned(net, proto)
        trained = {t.name for t in rows if t.trains}
        sizes = {t.name: t.size for t in rows}
        why = {t.name: t.why for t in rows if t.name in trained ^ expected}
        assert (trained - expected, expected - trained) == (set(), set()), (level, why)
        kept = {n for n, p in net.named_parameters() if n in {t.name for t in rows}}
        assert kept <= trained, level
        surprising = {t.name for t in rows if t.doubtful}
        scalars = {n for n in trained if sizes[n] == 1 and n in SCALARS}
        assert surprising <= scalars, level
        assert level != "plain" or surprising == scalars
        noted = not dynamo or level == "plain"  # optimized, some nodes lose their metadata
        assert wrong_aliases(net, proto, complete=noted) == {}, level
