"""Metrics of embeddings, against torchmetrics, scipy and plain loops."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from onnxgrad.errors import EvaluationError
from onnxgrad.metrics.base import PredictionInfo
from onnxgrad.metrics.retrieval import CosineSpearman, Retrieval
from onnxgrad.metrics.select import select_metric
from tests.support.errors import naming
from tests.support.metric_values import batched_value
from tests.support.running import in_sweep

INFO = PredictionInfo()
SEEDS = [*range(4), *map(in_sweep, range(4, 50))]


def embeddings_and_classes(seed):
    """Return 12 to 39 rows of five numbers, and the classes of these rows."""
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(12, 40))
    return rng.normal(size=(rows, 5)).astype(np.float32), rng.integers(0, 6, rows)


def searches(z, y, queries):
    """Yield for each query the cosines and the relevance of what it is compared with."""
    z = z / np.linalg.norm(z, axis=1, keepdims=True)
    several = [i for i in range(len(y)) if (y == y[i]).sum() > 1]
    first = [i for i in several if i == np.flatnonzero(y == y[i])[0]]
    for i in several if queries == "all" else first:
        skipped = [i] if queries == "all" else first
        others = [j for j in range(len(y)) if j not in skipped]
        yield z[others] @ z[i], y[others] == y[i]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("queries", ["all", "first"])
def test_retrieval(seed, queries):
    torch, torchmetrics = pytest.importorskip("torch"), pytest.importorskip("torchmetrics")
    z, y = embeddings_and_classes(seed)
    k = 1 + seed % 7
    found = list(searches(z, y, queries))
    indices = np.repeat(np.arange(len(found)), [len(scores) for scores, _ in found])
    scores, relevant = (torch.tensor(np.concatenate(part)) for part in zip(*found, strict=True))
    for measure, kind in (("recall", "RetrievalRecall"), ("hit_rate", "RetrievalHitRate")):
        theirs = getattr(torchmetrics.retrieval, kind)(top_k=k)
        above_zero = scores + 2  # torchmetrics finds nothing below
        expected = theirs(above_zero, relevant, indexes=torch.tensor(indices)).item()
        value = batched_value(Retrieval(k, measure, queries), INFO, z, y)
        assert value == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("seed", SEEDS)
def test_spearman(seed):
    stats = pytest.importorskip("scipy.stats")
    z, _ = embeddings_and_classes(seed)
    z = z[: len(z) // 2 * 2]
    gold = np.random.default_rng(seed).integers(0, 5, len(z) // 2) / 4  # with ties
    a, b = z[::2], z[1::2]
    cosine = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    found = batched_value(CosineSpearman(), INFO, z, gold.repeat(2).astype(np.float32))
    assert found == pytest.approx(stats.spearmanr(cosine, gold).statistic, abs=1e-6)


def test_many_queries_are_compared_in_chunks(monkeypatch):
    z, y = embeddings_and_classes(1)
    whole = batched_value(Retrieval(3), INFO, z, y)
    monkeypatch.setattr("onnxgrad.metrics.retrieval.QUERIES_AT_ONCE", 4)
    assert batched_value(Retrieval(3), INFO, z, y) == whole


def test_more_rows_than_there_are():
    """All are found, and neither a query itself nor other queries are among them."""
    z, y = embeddings_and_classes(2)
    for queries in ("all", "first"):
        assert batched_value(Retrieval(1000, queries=queries), INFO, z, y) == 1


NAMES = "recall_at_5 hit_rate_at_12 query_recall_at_1 query_hit_rate_at_3 cosine_spearman"


@pytest.mark.parametrize("name", NAMES.split())
def test_names(name):
    metric = copy.deepcopy(select_metric(name))
    assert metric.name == name
    with pytest.raises(EvaluationError, match=naming(name, "begin")):
        metric.compute()
    metric.begin(PredictionInfo())
    with pytest.raises(ValueError, match=f"'{name}'.*compute"):
        metric.compute()


def test_refuses():
    z, y = embeddings_and_classes(0)

    def refuse(metric, scores, labels):
        return lambda: batched_value(metric, INFO, scores, labels, cuts=())

    for wrong, message in (
        (lambda: Retrieval(0), "1 or more"),
        (lambda: Retrieval(1, "precision"), "Unknown measure"),
        (lambda: Retrieval(1, queries="last"), "Unknown queries"),
        (lambda: select_metric("recall_at_0"), "Unknown metric"),
        (refuse(Retrieval(1), z, y[:, None]), r"labels \(rows,\)"),
        (refuse(Retrieval(1), z * np.nan, y), "NaN or infinity"),
        (refuse(Retrieval(1), z, np.arange(len(z))), "class.* two rows"),
        (refuse(CosineSpearman(), z[:5], np.zeros(5)), "both rows"),
        (refuse(CosineSpearman(), z[:4], np.arange(4.0)), "both rows"),
        (refuse(CosineSpearman(), z[:4], np.ones(4)), "undefined"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()
    metric = Retrieval(1)
    metric.begin(PredictionInfo())
    with pytest.raises(ValueError, match=naming("'recall_at_1'", "sample weights")):
        metric.update(z, y, np.zeros(len(y)))
