"""False alarms per hour, against a loop over windows."""

import numpy as np
import pytest

import onnxgrad as og
from tests.support.errors import naming
from tests.support.running import in_sweep


def alarms_by_loop(scores, labels, seconds, threshold, hold):
    """Count as a person would, window by window."""
    false, events, missed, quiet = 0, 0, 0, 0
    for s, y in zip(scores, labels, strict=True):
        last = -1e9  # seconds
        for t, (value, label) in enumerate(zip(s, y, strict=True)):
            quiet += label == 0
            if value >= threshold and t * seconds - last > hold - 1e-6:
                last = t * seconds
                false += label == 0
        t = 0
        while t < len(y):
            end = t
            while end < len(y) and y[end]:
                end += 1
            if end > t:
                events += 1
                missed += max(s[t:end]) < threshold
            t = end + 1
    return false / (quiet * seconds / 3600), missed / events


@pytest.mark.parametrize("seed", [*range(8), *map(in_sweep, range(8, 50))])
def test_alarms_are_those_of_a_loop(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 30, rng.integers(1, 5))
    scores = [rng.random(n).round(rng.integers(1, 4)) for n in lengths]
    labels = [(rng.random(n) < 0.3).astype(int) for n in lengths]
    labels[0][:1], labels[-1][-1:] = 1, 0
    if len(lengths) == 1 and lengths[0] == 1:
        scores, labels = [np.array([0.2, 0.6])], [np.array([0, 1])]
    seconds, hold = float(rng.choice([0.08, 0.5])), float(rng.choice([0.0, 0.5, 1.0]))
    curve = og.metrics.false_alarms(scores, labels, seconds, hold=hold)
    assert len(curve.thresholds) == len(np.unique(np.concatenate(scores)))
    for threshold, per_hour, missed in zip(*curve, strict=True):
        want = alarms_by_loop(scores, labels, seconds, threshold, hold)
        np.testing.assert_allclose((per_hour, missed), want, rtol=1e-9, atol=1e-12)
    best = curve.at(missed=0.2)[1]
    assert best == min(f for f, m in zip(curve.per_hour, curve.missed, strict=True) if m <= 0.2)


def test_alarms_that_cannot_be_counted():
    with pytest.raises(ValueError, match=naming("labels", "must be 1", "both")):
        og.metrics.false_alarms([0.1, 0.2], [0, 0], 1)
    with pytest.raises(ValueError, match=naming("scores", "one label")):
        og.metrics.false_alarms([0.1, 0.2], [0, 1, 0], 1)
    with pytest.raises(ValueError, match=naming("missed=0.5", "larger missed=")):
        og.metrics.false_alarms([0.1, 0.2], [0, 1], 1, thresholds=[0.5]).at(0.5)
