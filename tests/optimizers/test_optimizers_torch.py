"""Fifty steps along fixed gradients, with learning rates that change: as `torch.optim`."""

from __future__ import annotations

import numpy as np
import pytest

from onnxgrad import add_loss_output, optimizers as of
from onnxgrad.compat import LearningRateSGD, OrtGradientOptimizer
from onnxgrad.optimizers import Chain, presets
from tests.support.models import parse_model
from tests.support.optimizer_runs import (
    RATES,
    SHAPES,
    TOLERANCE,
    assert_equal_weights,
    first_slots,
    first_weights,
    fixed_gradients,
    update_session,
    weights_after_fifty_steps,
)
from tests.support.running import in_sweep

torch = pytest.importorskip("torch")
clips = torch.nn.utils

PLAIN = ["SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop"]
PLAIN += ["Rprop", "Adafactor"]
BETAS, TORCH_BETAS = {"b1": 0.8, "b2": 0.9}, {"betas": (0.8, 0.9)}
DECAY, AMSGRAD = {"weight_decay": 0.1}, {"weight_decay": 0.1, "amsgrad": True}
EPS = {"weight_decay": 0.1, "eps": 1e-3}
NESTEROV = {"momentum": 0.8, "nesterov": True, "weight_decay": 0.1}
ADAGRAD = {"lr_decay": 0.1, "initial_accumulator_value": 0.2}
RMSPROP = {"alpha": 0.9, "momentum": 0.8, "centered": True}
RPROP = {"etas": (0.4, 1.3), "step_sizes": (1e-3, 0.03)}
ADAFACTOR = {"beta2_decay": -0.7, "eps": (1e-4, 1e-2), "d": 1.2}
WITNESSES = {  # an optimizer, the name of that of PyTorch, its options
    **{name.lower(): (presets.select(name), name, {}) for name in PLAIN},
    "sgd with all": (of.sgd(**NESTEROV), "SGD", NESTEROV),
    "momentum": (of.momentum(0.8, 0.1), "SGD", DECAY | {"momentum": 0.8}),
    "nesterov": (of.nesterov(0.8, 0.1), "SGD", NESTEROV),
    "adam with all": (of.adam(**BETAS, eps=1e-3, **AMSGRAD), "Adam", TORCH_BETAS | EPS | AMSGRAD),
    "adam without momentum": (of.adam(b1=0.0), "Adam", {"betas": (0.0, 0.999)}),
    "adamw with all": (of.adamw(**BETAS, **AMSGRAD), "AdamW", TORCH_BETAS | AMSGRAD),
    "adamax with all": (of.adamax(**BETAS, **EPS), "Adamax", TORCH_BETAS | EPS),
    "nadam with all": (
        of.nadam(**BETAS, **EPS, momentum_decay=0.1),
        "NAdam",
        TORCH_BETAS | EPS | {"momentum_decay": 0.1},
    ),
    "radam with all": (of.radam(0.8, 0.99, **EPS), "RAdam", EPS | {"betas": (0.8, 0.99)}),
    "radam that never adapts": (of.radam(b2=0.6), "RAdam", {"betas": (0.9, 0.6)}),
    "adagrad with all": (of.adagrad(0.1, 0.1, 0.2, 1e-3), "Adagrad", EPS | ADAGRAD),
    "adadelta with all": (of.adadelta(0.8, 1e-3, 0.1), "Adadelta", EPS | {"rho": 0.8}),
    "rmsprop with all": (of.rmsprop(0.9, 1e-3, 0.1, 0.8, True), "RMSprop", EPS | RMSPROP),
    "rprop with all": (of.rprop(*RPROP.values()), "Rprop", RPROP),
    "adafactor with all": (
        of.adafactor(*ADAFACTOR.values(), **DECAY), "Adafactor", ADAFACTOR | DECAY,
    ),
}  # fmt: skip
DTYPES = pytest.mark.parametrize("dtype", [np.float64, in_sweep(np.float32)])


@pytest.fixture(autouse=True)
def torch_in_float64():
    """NAdam stores a product in the default dtype."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def as_parameters(arrays):
    return {name: torch.tensor(a, requires_grad=True) for name, a in arrays.items()}


def steps_of_torch(optimizers, parameters, dtype, before=lambda parameters: None):
    for gradient, rate in zip(fixed_gradients(dtype), RATES, strict=True):
        for name, p in parameters.items():
            p.grad = torch.tensor(gradient[name])
        before(parameters)
        for optimizer, factor in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
            optimizer.step()
    return {name: p.detach().numpy() for name, p in parameters.items()}


@DTYPES
@pytest.mark.parametrize("name", WITNESSES)
def test_fifty_steps(name, dtype):
    ours, theirs, arguments = WITNESSES[name]
    p = as_parameters(first_weights(dtype))
    optimizer = getattr(torch.optim, theirs)(p.values(), lr=RATES[0], **arguments)
    assert_equal_weights(
        weights_after_fifty_steps(ours, dtype)[0],
        steps_of_torch([(optimizer, 1)], p, dtype),
        TOLERANCE[dtype],
    )


def test_adafactor_of_gradients_whose_mean_square_is_below_eps():
    """There the estimate is the product of the means of rows and columns over eps."""
    rng, options = np.random.default_rng(0), {"eps": (0.04, 1e-3), "d": 100.0}
    w, gradient = rng.standard_normal((2, 3)), rng.uniform(0.1, 0.2, (2, 3))
    p = torch.tensor(w, requires_grad=True)
    p.grad = torch.tensor(gradient)
    torch.optim.Adafactor([p], lr=0.1, **options).step()
    ours = of.adafactor(**options)
    fed = {"w": w, "w_grad": gradient, **first_slots(ours, {"w": w})}
    fed |= {"minus_learning_rate": np.array(-0.1), "step": np.array(1)}
    new = update_session(ours, np.float64, {"w": w.shape}).run(None, fed)[0]
    np.testing.assert_allclose(new, p.detach().numpy(), rtol=1e-12)


@pytest.mark.parametrize(
    "name", ["adam", "rprop", "adafactor", *map(in_sweep, ["sgd", "nadam", "radam", "rmsprop"])]
)
def test_fifty_steps_of_a_trainer(name):
    """All rows in each batch, weights in one packed vector where that may be."""
    text = """g (double[N, 6] x) => (double[N, 2] y) {
        h = MatMul(x, w)  a = Tanh(h)  z = MatMul(a, v)  y = Add(z, b) }"""
    values = {"w": first_weights()["tall"], "b": first_weights()["bias"][:2], "v": np.ones((4, 2))}
    rng = np.random.default_rng(2)
    rows, labels = rng.standard_normal((8, 6)), rng.standard_normal((8, 2))
    ours, theirs, arguments = WITNESSES[name]
    trainer = OrtGradientOptimizer(
        add_loss_output(parse_model(text, **values)),
        list(values),
        max_iter=50,
        batch_size=8,
        training_optimizer_name=ours,
        learning_rate=LearningRateSGD(0.05, learning_rate="invscaling", power_t=0.5),
    ).fit(rows, labels)
    p = as_parameters(values)
    optimizer = getattr(torch.optim, theirs)(p.values(), lr=0.05, **arguments)
    for t in range(50):
        optimizer.param_groups[0]["lr"] = 0.05 / (t + 1) ** 0.5
        optimizer.zero_grad()
        y = torch.tanh(torch.tensor(rows) @ p["w"]) @ p["v"] + p["b"]
        (((y - torch.tensor(labels)) ** 2).sum() / 8).backward()
        optimizer.step()
    assert_equal_weights(trainer.trained_coef_, {n: v.detach().numpy() for n, v in p.items()}, 1e-9)


@DTYPES
@pytest.mark.parametrize(
    ("adjust", "nesterov"),
    [(None, False), ("match_rms_adamw", True), in_sweep(None, True)],
)
def test_muon_for_matrices_and_adamw_for_the_rest(monkeypatch, adjust, nesterov, dtype):
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)  # as precise as the weights
    p = as_parameters(first_weights(dtype))
    arguments = {"adjust_lr_fn": adjust, "nesterov": nesterov, "momentum": 0.8}
    matrices = torch.optim.Muon([p["tall"]], **arguments)
    others = torch.optim.AdamW([p[n] for n in SHAPES if n != "tall"], weight_decay=0.01)
    ours = of.muon(other=of.ParamGroup(of.adamw(), rate=0.5), exclude=("wi*",), **arguments)
    theirs = steps_of_torch([(matrices, 1), (others, 0.5)], p, dtype)
    assert_equal_weights(weights_after_fifty_steps(ours, dtype)[0], theirs, TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (of.clip(0.3), lambda p: clips.clip_grad_value_(p.values(), 0.3)),
        (of.clip_by_global_norm(2.0), lambda p: clips.clip_grad_norm_(p.values(), 2.0)),
        (of.clip_by_norm(0.5), lambda p: [clips.clip_grad_norm_([v], 0.5) for v in p.values()]),
    ],
)
@DTYPES
def test_clipping(ours, theirs, dtype):
    p = as_parameters(first_weights(dtype))
    optimizer = torch.optim.Adam(p.values())
    weights = weights_after_fifty_steps(Chain((ours, of.adam())), dtype)[0]
    assert_equal_weights(
        weights, steps_of_torch([(optimizer, 1)], p, dtype, theirs), TOLERANCE[dtype]
    )


def test_groups_with_rates_and_decays_of_their_own():
    p = as_parameters(first_weights())
    decayed, bias = ["scale", "tall", "wide"], ["bias", "norm.weight"]
    adamw = torch.optim.AdamW(
        [
            {"params": [p[n] for n in decayed], "weight_decay": 0.1},
            {"params": [p[n] for n in bias], "weight_decay": 0.0},
        ]
    )
    sgd = torch.optim.SGD([p["conv"]], momentum=0.9)
    ours = of.param_groups(
        {
            "bias": of.ParamGroup(weight_decay=0.0),
            "norm.*": of.ParamGroup(weight_decay=0.0),
            "c*": of.ParamGroup(of.momentum(), rate=0.25),
        },
        default=of.adamw(weight_decay=0.1),
    )
    theirs = steps_of_torch([(adamw, 1), (sgd, 0.25)], p, np.float64)
    assert_equal_weights(weights_after_fifty_steps(ours, np.float64)[0], theirs, 1e-10)
    excluded = of.adamw(weight_decay=0.1, exclude=("bias", "norm*"))
    p = as_parameters(first_weights())
    groups = [{"params": [p[n] for n in bias], "weight_decay": 0.0}]
    groups += [{"params": [p[n] for n in (*decayed, "conv")], "weight_decay": 0.1}]
    theirs = steps_of_torch([(torch.optim.AdamW(groups), 1)], p, np.float64)
    assert_equal_weights(weights_after_fifty_steps(excluded, np.float64)[0], theirs, 1e-10)


@pytest.mark.parametrize("debias", [False, True])
def test_exponential_average(debias):
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    p = as_parameters(first_weights())
    module = torch.nn.ParameterList(p.values())
    average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    average.update_parameters(module)  # starts it at the weights
    if debias:
        for value in average.parameters():
            value.data.zero_()
    optimizer = torch.optim.Adam(p.values())
    optimizer.register_step_post_hook(lambda *_: average.update_parameters(module))
    theirs = steps_of_torch([(optimizer, 1)], p, np.float64)
    weights, mean = weights_after_fifty_steps(of.ema(of.adam(), 0.8, debias), np.float64)
    assert_equal_weights(weights, theirs, 1e-10)
    correction = 1 - 0.8**50 if debias else 1.0
    averages = [value.detach().numpy() / correction for value in average.parameters()]
    assert_equal_weights(mean, dict(zip(p, averages, strict=True)), 1e-10)


def test_average_of_some_steps():
    from torch.optim.swa_utils import AveragedModel

    p = as_parameters(first_weights())
    module = torch.nn.ParameterList(p.values())
    average, count = AveragedModel(module), iter(range(1, 51))

    def update(*_):
        if (t := next(count)) >= 7 and (t - 7) % 4 == 0:
            average.update_parameters(module)

    optimizer = torch.optim.SGD(p.values(), momentum=0.9)
    optimizer.register_step_post_hook(update)
    theirs = steps_of_torch([(optimizer, 1)], p, np.float64)
    weights, mean = weights_after_fifty_steps(of.swa(of.momentum(), start=7, every=4), np.float64)
    assert_equal_weights(weights, theirs, 1e-10)
    averages = [value.detach().numpy() for value in average.parameters()]
    assert_equal_weights(mean, dict(zip(p, averages, strict=True)), 1e-10)
