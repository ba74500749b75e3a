"""Learning rates by step, against PyTorch's and optax's schedulers."""

from __future__ import annotations

import doctest
import importlib
import itertools
import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

from onnxgrad.schedules.base import MemberRates, Schedule, constant, select, steps_in
from onnxgrad.schedules.compose import Join, join, warmup
from onnxgrad.schedules.curves import (
    cosine,
    exponential,
    inverse_sqrt,
    linear,
    one_cycle,
    plateau,
    polynomial,
    step_decay,
)
from tests.support.errors import naming
from tests.support.running import in_sweep

STEPS = 60
ROOM = ("base", "compose", "curves")
ALL = [
    constant(0.1),
    step_decay(0.1, every=7),
    exponential(0.1, 0.9),
    linear(0.1),
    cosine(0.1, warmup=0.1),
    cosine(0.1, period=0.25, factor=2),
    polynomial(0.1, power=2),
    one_cycle(0.1),
    inverse_sqrt(0.1, warmup=5),
    warmup(0.1, 5),
    join([0.1, linear(0.2)], [0.5]),
    plateau(0.1),
    warmup(plateau(0.1), 5),
]


def rates(schedule: Callable[[int], float], steps: int = STEPS) -> np.ndarray:
    """Return the rates of a run, and of as many steps beyond its end."""
    return np.array([schedule(step) for step in range(2 * steps)])


def assert_rates(actual, expected, scale=0.1) -> None:
    np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-13 * scale)


# -- PyTorch ---------------------------------------------------------------------------------------


def scheduler(name: str, rate: float = 0.1, **options):
    """Return a scheduler of PyTorch, whose optimizer starts at `rate`."""
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=rate)
    scheduled = getattr(torch.optim.lr_scheduler, name)(optimizer, **options)
    optimizer.step()  # or the first step of the scheduler warns
    return scheduled


def torch_rates(steps: int, name: str, rate: float = 0.1, **options) -> list[float]:
    scheduled, values = scheduler(name, rate, **options), []
    for step in range(steps):
        values.append(scheduled.get_last_lr()[0])
        if step < steps - 1:
            scheduled.step()
    return values


@pytest.mark.parametrize(
    ("schedule", "name", "options"),
    [
        (step_decay(0.1, every=7, factor=0.5), "StepLR", {"step_size": 7, "gamma": 0.5}),
        (exponential(0.1, 0.9), "ExponentialLR", {"gamma": 0.9}),
        (
            linear(0.1, 0.02),
            "LinearLR",
            {"start_factor": 1.0, "end_factor": 0.2, "total_iters": STEPS},
        ),
        (polynomial(0.1, power=1.5), "PolynomialLR", {"power": 1.5, "total_iters": STEPS}),
    ],
)
def test_schedules_are_those_of_torch(schedule, name, options):
    scale = 0 if name in ("StepLR", "ExponentialLR") else 0.1
    assert_rates(rates(schedule.over(STEPS)), torch_rates(2 * STEPS, name, **options), scale)


def test_cosine_is_that_of_torch():
    """PyTorch's goes up again after its end."""
    expected = torch_rates(STEPS + 1, "CosineAnnealingLR", T_max=STEPS, eta_min=0.01)
    actual = rates(cosine(0.1, end=0.01).over(STEPS))
    assert_rates(actual[: STEPS + 1], expected)
    assert_rates(actual[STEPS:], 0.01)


@pytest.mark.parametrize("factor", [1, 2, 3])
def test_restarts_are_those_of_torch(factor):
    options = {"T_0": 12, "T_mult": factor, "eta_min": 0.001}
    expected = torch_rates(2 * STEPS, "CosineAnnealingWarmRestarts", **options)
    assert_rates(rates(cosine(0.1, period=12, factor=factor, end=0.001)), expected)
    assert_rates(rates(cosine(0.1, period=0.2, factor=factor, end=0.001).over(STEPS)), expected)


ONE_CYCLES = [
    one
    for one in itertools.product(
        [2, 7, 10, STEPS], ["cos", "linear"], [False, True], [0.3, 0.45, 0.5]
    )
    if one[0] * one[3] != 1  # where PyTorch divides by zero
]


@pytest.mark.parametrize(("steps", "strategy", "three_phase", "pct_start"), ONE_CYCLES)
def test_one_cycle_is_that_of_torch(steps, strategy, three_phase, pct_start):
    options = {"anneal_strategy": strategy, "three_phase": three_phase, "pct_start": pct_start}
    options |= {"div_factor": 10.0, "final_div_factor": 100.0}
    expected = torch_rates(
        steps, "OneCycleLR", max_lr=0.1, total_steps=steps, cycle_momentum=False, **options
    )
    actual = rates(one_cycle(0.1, **options).over(steps), steps)
    assert_rates(actual[:steps], expected)
    assert_rates(actual[steps:], expected[-1])


@pytest.mark.parametrize("pct_start", [0.0, 1.0])
def test_one_cycle_of_one_phase(pct_start):
    expected = torch_rates(20, "OneCycleLR", max_lr=0.1, total_steps=20, pct_start=pct_start)
    assert_rates(rates(one_cycle(0.1, pct_start=pct_start).over(20), 20)[:20], expected)


@pytest.mark.parametrize("steps", [1, 2])
def test_one_cycle_without_a_way_up(steps):
    """PyTorch divides by zero where the way up has no length."""
    actual = one_cycle(0.1, steps=steps, pct_start=1 / steps, three_phase=steps == 2)
    last = 0.1 if steps == 1 else 0.1 / 25e4
    assert [actual(0), actual(1)] == pytest.approx([0.1, last])


def test_inverse_sqrt_is_a_formula_in_torch():
    expected = torch_rates(
        2 * STEPS, "LambdaLR", lr_lambda=lambda t: min((t or 1e-9) ** -0.5 * 9**0.5, t / 9)
    )
    assert_rates(rates(inverse_sqrt(0.1, warmup=9)), expected)
    assert_rates(rates(inverse_sqrt(0.1, warmup=0.15).over(STEPS)), expected)


def test_warmup_is_a_sequence_in_torch():
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    kinds = torch.optim.lr_scheduler
    parts = [
        kinds.LinearLR(optimizer, start_factor=0.1, total_iters=10),
        kinds.StepLR(optimizer, step_size=7),
    ]
    sequence, expected = kinds.SequentialLR(optimizer, parts, [10]), []
    optimizer.step()
    for _ in range(2 * STEPS):
        expected.append(sequence.get_last_lr()[0])
        sequence.step()
    assert_rates(rates(warmup(step_decay(0.1, every=7), 10, start=0.01)), expected)
    joined = join([linear(0.01, 0.1, steps=10), step_decay(0.1, every=7)], [10])
    assert_rates(rates(joined), expected)


@pytest.mark.parametrize("seed", [*range(8), *map(in_sweep, range(8, 30))])
def test_plateau_is_that_of_torch(seed):
    rng = np.random.default_rng(seed)
    mode = ["min", "max"][seed % 2]
    options = {"mode": mode, "factor": rng.uniform(0.1, 0.9), "patience": int(rng.integers(0, 5))}
    options |= {"threshold": rng.choice([0.0, 0.05]), "cooldown": int(rng.integers(0, 4))}
    lowest = rng.choice([0.0, 0.02])
    witness = scheduler("ReduceLROnPlateau", min_lr=lowest, eps=0, **options)
    schedule, state, seen = plateau(0.1, monitor="m", min_rate=lowest, **options), {}, set()
    trend = np.linspace(3, 2, 80) if mode == "min" else np.linspace(2, 3, 80)
    for step, value in enumerate((trend + rng.normal(size=80) / 5).tolist() + [np.nan] * 5):
        witness.step(value)
        state = json.loads(json.dumps(schedule.observed(state, {"m": value, "step": step})))
        state = schedule.observed(state, {"loss": 0.0, "step": step})  # without the metric
        assert_rates(schedule.rate(step, state), witness.get_last_lr()[0])
        seen.add(schedule.rate(step, state))
    assert len(seen) > 1


# -- optax -----------------------------------------------------------------------------------------

WARMUP_COSINE = ("warmup_cosine_decay_schedule", [0.0, 0.1, 12, STEPS, 0.01])


@pytest.mark.parametrize(
    ("schedule", "name", "options"),
    [
        (constant(0.1), "constant_schedule", [0.1]),
        (linear(0.1, 0.3), "linear_schedule", [0.1, 0.3, STEPS]),
        (polynomial(0.1, 3.0, 0.01), "polynomial_schedule", [0.1, 0.01, 3.0, STEPS]),
        (exponential(0.1, 0.5, every=9), "exponential_decay", [0.1, 9, 0.5]),
        (step_decay(0.1, 9, 0.5), "exponential_decay", [0.1, 9, 0.5, 0, True]),
        (cosine(0.1), "cosine_decay_schedule", [0.1, STEPS]),
        (cosine(0.1, warmup=0.2, end=0.01), *WARMUP_COSINE),
        (cosine(0.1, STEPS, warmup=12, end=0.01), *WARMUP_COSINE),
        (warmup(0.1, 10, start=0.05), "warmup_constant_schedule", [0.05, 0.1, 10]),
        (
            warmup(exponential(0.1, 0.9), 10),
            "warmup_exponential_decay_schedule",
            [0.0, 0.1, 10, 1, 0.9],
        ),
    ],
)
def test_optax(schedule, name, options):
    optax, jax = pytest.importorskip("optax"), pytest.importorskip("jax")
    with jax.enable_x64(True):
        witness = getattr(optax, name)(*options)
        expected = rates(lambda step: float(witness(step)))
    assert_rates(rates(schedule.over(STEPS)), expected)


def test_optax_join():
    optax, jax = pytest.importorskip("optax"), pytest.importorskip("jax")
    with jax.enable_x64(True):
        parts = [
            optax.constant_schedule(0.1),
            optax.linear_schedule(0.2, 0.0, 30),
            optax.cosine_decay_schedule(0.3, 15),
        ]
        witness = optax.join_schedules(parts, [15, 45])
        expected = rates(lambda step: float(witness(step)))
    parts = [0.1, linear(0.2), cosine(0.3)]
    assert_rates(rates(join(parts, [15, 45]).over(STEPS)), expected)
    assert_rates(rates(join(parts, [0.25, 0.75]).over(STEPS)), expected)
    assert_rates(rates(join(parts, [0.25, 45]).over(STEPS)), expected)


# -- the number of steps ---------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ALL, ids=repr)
def test_over_leaves_a_function_of_the_step(schedule):
    filled = schedule.over(STEPS)
    assert filled.over(2 * STEPS) == filled
    assert pickle.loads(pickle.dumps(filled)) == filled
    assert hash(pickle.loads(pickle.dumps(schedule))) == hash(schedule)
    assert np.isfinite(rates(filled)).all()
    assert rates(filled).max() <= 0.2 + 1e-15


def test_repr_is_code():
    namespace = {}
    for name in ROOM:
        namespace |= vars(importlib.import_module(f"onnxgrad.schedules.{name}"))
    for schedule in ALL:
        assert eval(repr(schedule), namespace) == schedule


@pytest.mark.parametrize(
    "schedule",
    [
        linear(0.1),
        cosine(0.1),
        one_cycle(0.1),
        polynomial(0.1),
        warmup(cosine(0.1), 5),
        warmup(0.1, 0.1),
        join([0.1, linear(0.2)], [0.5]),
        join([0.1, 0.2], [0.5]),
        cosine(0.1, period=0.5),
        inverse_sqrt(0.1, 0.1),
    ],
    ids=repr,
)
def test_a_schedule_of_the_whole_run_needs_its_steps(schedule):
    with pytest.raises(ValueError, match=r"call over\(steps\)"):
        schedule(0)


def test_a_run_that_ends_within_the_warmup():
    assert_rates(rates(warmup(cosine(0.1), 10).over(5), 2), [0.0, 0.01, 0.02, 0.03])
    assert_rates(rates(join([0.1, cosine(0.2)], [10]).over(5), 2), 0.1)


def test_numbers_of_numpy_become_those_of_python():
    schedule = cosine(np.float32(0.5), steps=np.int64(4), warmup=np.int32(1))
    assert repr(schedule.schedule) == "Cosine(peak=0.5, end=0.0, steps=3)"
    assert (type(schedule.warmup), type(schedule.start)) == (int, float)


# -- a plateau within other schedules --------------------------------------------------------------


def observed_rates(schedule: Schedule, losses: dict[int, float], steps: int = 40) -> np.ndarray:
    """Return the rates of a run with these losses after so many steps."""
    state, actual = {}, []
    for step in range(steps):
        if step in losses:
            record = {"validation_loss": losses[step], "step": step}
            state = json.loads(json.dumps(schedule.observed(state, record)))
        actual.append(schedule.rate(step, state))
    return np.array(actual)


def test_warmup_before_a_plateau():
    """Losses up to the end of the warm-up do not count."""
    schedule = warmup(plateau(0.1, patience=0, factor=0.5), 10)
    assert schedule.monitors == ("validation_loss",)
    losses = {4: 0.1, 8: 0.1, 10: 0.1, 15: 3.0, 20: 2.0, 25: 2.0, 30: 2.0}
    expected = np.r_[np.arange(10) * 0.01, np.full(15, 0.1), np.full(5, 0.05), np.full(10, 0.025)]
    assert_rates(observed_rates(schedule, losses), expected)


def test_a_plateau_in_a_join():
    """Each plateau observes its own steps only, and the rate afterwards is that of the others."""
    first, last = plateau(0.1, patience=0, factor=0.5), plateau(0.2, patience=0, factor=0.1)
    schedule = join([first, 0.3, last], [10, 20])
    losses = {0: 9.0, 5: 1.0, 10: 1.0, 15: 9.0, 20: 9.0, 24: 5.0, 28: 5.0}
    expected = np.r_[np.full(10, 0.1), np.full(10, 0.3), np.full(8, 0.2), np.full(12, 0.02)]
    assert_rates(observed_rates(schedule, losses), expected)
    losses[8] = 1.0
    expected[8:10] = 0.05
    assert_rates(observed_rates(schedule, losses), expected)
    nested = join([0.1, warmup(plateau(0.1, patience=0), 4)], [10])
    assert_rates(
        observed_rates(nested, {12: 1.0, 14: 1.0, 15: 1.0, 18: 1.0})[14:], [0.1] * 4 + [0.01] * 22
    )
    nested = warmup(join([0.1, plateau(0.1, patience=0)], [5]), 5)
    assert_rates(
        observed_rates(nested, {9: 1.0, 10: 1.0, 12: 1.0, 14: 1.0})[5:], [0.1] * 9 + [0.01] * 26
    )


def test_a_record_without_step():
    schedule = warmup(plateau(0.1), 10)
    with pytest.raises(ValueError, match=naming("'step'", "history")):
        schedule.observed({}, {"validation_loss": 1.0})
    assert warmup(0.1, 10).observed({}, {"loss": 1.0}) == {}


def test_each_member_of_a_stack_observes_its_own_numbers_until_it_is_frozen():
    schedules = plateau(0.1, patience=0, factor=0.5), constant(0.3)
    state = SimpleNamespace(schedule={}, frozen={})
    members = [schedules[k % 2].rates_of_training(state, None, k) for k in range(3)]
    assert [member.steady for member in members] == [False, True, False]
    stack = MemberRates(members, state)
    assert not stack.steady
    for step, losses in enumerate([(3.0, 3.0, 3.0), (2.0, 4.0, 4.0), (1.0, 4.0, 5.0)]):
        stack.observe({"step": step, "validation_loss": np.array(losses)})
    assert_rates(stack.rates_from(7, 2), [[0.1, 0.3, 0.025]] * 2)
    state.frozen = {2: 3}
    stack.observe({"step": 3, "validation_loss": np.array([9.0, 9.0, 9.0])})
    assert_rates(stack.rates_from(8, 1), [[0.05, 0.3, 0.025]])
    assert json.loads(json.dumps(state.schedule))["0"]["best"] == 1.0


def test_rates_of_several_steps():
    for schedule in (constant(0.1), cosine(0.1, 9, warmup=2)):
        assert_rates(schedule.rates(3, 4, {}), [schedule(step) for step in range(3, 7)])


def test_one_model_keeps_the_state_of_its_schedule_alone():
    state, schedule = SimpleNamespace(schedule={}), plateau(0.1, patience=0, factor=0.5)
    rates_of_one = schedule.rates_of_training(state, None)
    for loss in (1.0, 2.0):
        rates_of_one.observe({"step": 1, "validation_loss": loss})
    assert state.schedule == schedule.observed(
        schedule.observed({}, {"validation_loss": 1.0}), {"validation_loss": 2.0}
    )
    assert_rates(rates_of_one.rates_from(5, 3), [0.05] * 3)


# -- arguments -------------------------------------------------------------------------------------


WRONG = [  # a call, and what the message must name
    (lambda: constant(-1), ["rate of Constant", "-1"]),
    (lambda: exponential(-1, 0.5), ["rate of Exponential", "-1"]),
    (lambda: plateau(-1), ["rate of Plateau", "-1"]),
    (lambda: constant(float("nan")), ["Constant", "nan"]),
    (lambda: constant(True), ["Constant", "True"]),
    (lambda: step_decay(0.1, every=0), ["every of Exponential", "1"]),
    (lambda: step_decay(0.1, every=2.5), ["every", "2.5"]),
    (lambda: exponential(0.1, factor=0), ["factor", "0"]),
    (lambda: linear(0.1, end=-0.1), ["end of Polynomial"]),
    (lambda: linear(0.1, steps=0), ["steps of Polynomial", "1"]),
    (lambda: polynomial(0.1, power=0), ["power of Polynomial"]),
    (lambda: cosine(0.1, warmup=1.5), ["warmup", "share", "1.5"]),
    (lambda: cosine(0.1, warmup=-1), ["warmup", "share", "-1"]),
    (lambda: cosine(0.1, steps=10, warmup=10), ["warmup of cosine", "10 steps", "fewer"]),
    (lambda: cosine(0.1, factor=2), ["factor of cosine", "period="]),
    (lambda: cosine(0.1, period=0), ["period", "1", "0"]),
    (lambda: one_cycle(0.1, anneal_strategy="cosine"), ["'cosine'", "'cos'"]),
    (lambda: one_cycle(0.1, pct_start=1.5), ["pct_start", "0 to 1"]),
    (lambda: one_cycle(0.1, pct_start=0.6, three_phase=True), ["pct_start", "0.5"]),
    (lambda: one_cycle(0.1, div_factor=0), ["div_factor", "0"]),
    (lambda: inverse_sqrt(0.1, warmup=0), ["warmup", "1"]),
    (lambda: warmup("cosine", 3), ["number", "schedule", "'cosine'"]),
    (lambda: join([0.1, 0.2], []), ["boundaries has 0", "need 1"]),
    (lambda: join([0.1, 0.2, 0.3], [5, 4]), ["boundaries", "decrease"]),
    (lambda: join([], []), ["schedules of Join", "one schedule"]),
    (lambda: plateau(0.1, factor=1.0), ["factor", "0 and 1"]),
    (lambda: plateau(0.1, mode="mix"), ["mode 'mix'"]),
    (lambda: plateau(0.1, patience=-1), ["patience of Plateau", "0"]),
    (lambda: plateau(0.1, min_rate=0.2), ["min_rate 0.2", "rate 0.1"]),
    (lambda: plateau(0.1, monitor=3), ["monitor of Plateau", "metric's name", "3"]),
]


@pytest.mark.parametrize(("make", "parts"), WRONG)
def test_wrong_arguments(make, parts):
    with pytest.raises(ValueError, match=naming(*parts)):
        make()


def test_boundaries_that_decrease_in_this_run():
    schedule = join([0.1, 0.2, 0.3], [0.5, 10])
    assert isinstance(schedule.over(20), Join)
    with pytest.raises(ValueError, match=naming("boundaries", "decrease", "[50, 10]")):
        schedule.over(100)


def test_select():
    assert select(0.1) == select(np.float64(0.1)) == constant(0.1)
    assert select(cosine(0.1)) == cosine(0.1)
    for wrong in ("cosine", None, -0.1, float("inf"), float("nan"), True, cosine):
        with pytest.raises(ValueError, match=naming("learning", "rate", repr(wrong))):
            select(wrong)


@dataclass(frozen=True)
class HalfwayDown(Schedule):
    steps: int | None = None

    def __call__(self, step):
        return 1.0 - step / (2 * steps_in(self, "steps"))


def test_own_schedule():
    schedule = warmup(HalfwayDown(), 4).over(12)
    assert schedule.schedule == HalfwayDown(8)
    assert schedule(8) == 0.75
    assert schedule.observed({"a": 1}, {}) == {"a": 1}


# -- pictures --------------------------------------------------------------------------------------


def test_plot(tmp_path):
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    ax = cosine(0.1, warmup=0.25).plot(STEPS)
    line = ax.lines[0]
    assert_rates(line.get_ydata(), rates(cosine(0.1, STEPS, warmup=15))[:STEPS])
    assert_rates(line.get_xdata(), np.arange(STEPS))
    assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_title()) == ("step", "learning rate", "Warmup")
    assert warmup(linear(0.1, steps=20), 4).plot(ax=ax) is ax
    assert len(ax.lines[1].get_xdata()) == 24
    ax.figure.savefig(tmp_path / "rates.png")
    assert (tmp_path / "rates.png").read_bytes().startswith(b"\x89PNG")
    assert "before any observation of validation_loss" in plateau(0.1).plot(9, ax).get_title()
    assert len(join([0.1, linear(0.1, steps=5)], [4]).plot(ax=ax).lines[-1].get_xdata()) == 9
    with pytest.raises(ValueError, match=naming("Constant", "steps=")):
        constant(0.1).plot()
    plt.close("all")


@pytest.mark.parametrize("name", ROOM)
def test_examples(name):
    result = doctest.testmod(importlib.import_module(f"onnxgrad.schedules.{name}"))
    assert result.attempted
    assert not result.failed
