"""What trains by default, against the parameters of the networks that were exported."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from tests.support.optimized_models import optimized_model
from tests.support.running import in_sweep
from tests.support.trainable_exports import NETWORK_NAMES, exported_network, random_network

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

from onnxgrad import trainable  # noqa: E402
from onnxgrad.model.weights import constant_refs  # noqa: E402

LEVELS = ("plain", "basic", "extended")
SCALARS = {  # learned ones, under all of their names
    "logit_scale", "exp", "/Exp_output_0", "temperature", "logit_bias", "scale", "alpha",
    "alphas.0", "alphas.1",
}  # fmt: skip
NAMED = {"slopes"}  # a buffer that might be learned: a warning names it
NAMELESS = {"query_embed.weight", "cls_token", "bn1.bias"}  # expanded or folded
ONE_OF_EACH_KIND = (  # of these, one export is tested by default
    "cnn", "depthwise", "vit", "rotary decoder", "encoder", "gru", "scaled logits",
    "point detector", "cosine attention", "scaled", "weight norm",
)  # fmt: skip


def elements_of(tensors) -> set[float]:
    return {x for t in tensors if t.is_floating_point() for x in t.detach().ravel().tolist()}


def learned_names(net, model: onnx.ModelProto) -> set[str]:
    """Return the names of what the parameters of `net` became in `model`.

    They are random: what holds one number only, whole numbers, or elements of buffers, is of none.
    Single numbers are parameters, or their e^p.
    """
    buffers = elements_of(net.buffers())
    single = [p.detach() for p in net.parameters() if p.numel() == 1]
    single = elements_of(single) | elements_of(p.exp() for p in single)
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


def exports_of_networks() -> list:
    """Return every network with both exporters; most of them are of the sweep."""
    default = {(name, False) for name in ONE_OF_EACH_KIND} | {("cnn", True)}
    both = [(name, dynamo) for dynamo in (False, True) for name in NETWORK_NAMES]
    return [case if case in default else in_sweep(*case) for case in both]


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


@pytest.mark.parametrize(("name", "dynamo"), exports_of_networks())
def test_as_named_parameters(name, dynamo):
    net, _ = random_network(name)
    model = exported_network(name, dynamo)
    for level in LEVELS:
        rows = trainable(proto := optimized_model(model, level))
        expected = learned_names(net, proto)
        trained = {t.name for t in rows if t.trains}
        sizes = {t.name: t.size for t in rows}
        why = {t.name: t.why for t in rows if t.name in trained ^ expected}
        assert (trained - expected, expected - trained) == (set(), set()), (level, why)
        kept = {n for n, p in net.named_parameters() if n in {t.name for t in rows}}
        assert kept <= trained, level
        surprising = {t.name for t in rows if t.doubtful} - NAMED
        scalars = {n for n in trained if sizes[n] == 1 and n in SCALARS}
        assert surprising <= scalars, level
        assert level != "plain" or surprising == scalars
        noted = not dynamo or level == "plain"  # optimized, some nodes lose their metadata
        assert wrong_aliases(net, proto, complete=noted) == {}, level
