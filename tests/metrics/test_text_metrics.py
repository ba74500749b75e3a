"""Error rates of texts, against jiwer."""

import numpy as np
import pytest

import onnxgrad as og
from tests.support.errors import naming

pytest.importorskip("rapidfuzz")


def test_error_rates():
    """Those of jiwer, over all texts, in batches."""
    jiwer = pytest.importorskip("jiwer")
    rng = np.random.default_rng(0)
    for _ in range(8):
        pairs = []
        for _ in range(4):
            words = [
                "".join(rng.choice([*"abc"], rng.integers(1, 5))) for _ in range(rng.integers(1, 6))
            ]
            found = [w if rng.random() < 0.5 else w[::-1] + "x" for w in words]
            pairs.append((" ".join(found[rng.integers(2) :]), " ".join(words)))
        for unit, expected in ("characters", jiwer.cer), ("words", jiwer.wer):
            metric = og.metrics.TextErrorRate(lambda p, y: (list(p), list(y)), unit)
            metric.begin(og.metrics.PredictionInfo())
            for some in pairs[:3], pairs[3:]:
                metric.update(*map(np.array, zip(*some, strict=True)))
            found, truths = zip(*pairs, strict=True)
            assert metric.compute() == pytest.approx(expected([*truths], [*found]))


def test_weights_of_error_rates():
    metric = og.metrics.TextErrorRate(lambda p, y: (list(p), list(y)))
    metric.begin(og.metrics.PredictionInfo())
    with pytest.raises(ValueError, match=naming("empty", "rows with")):
        metric.compute()
    metric.update(np.array(["ab", "c"]), np.array(["aa", "cdef"]), np.array([1.0, 0.5]))
    assert metric.compute() == pytest.approx((1 + 0.5 * 3) / (2 + 0.5 * 4))
    with pytest.raises(ValueError, match=naming("one weight")):
        metric.update(np.array(["ab"]), np.array(["aa"]), np.ones((1, 2)))
    with pytest.raises(ValueError, match=naming("unit='lines'", "'characters' or 'words'")):
        og.metrics.TextErrorRate(lambda p, y: ([], []), "lines")
