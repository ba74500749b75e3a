"""`p_by_k`: batches of P classes with K rows each."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from onnxgrad.data import IndexedReader, p_by_k
from tests.support.running import in_sweep

LABELS = np.repeat([4, 7, 9, 11], [3, 5, 12, 4])
X = np.arange(24, dtype=np.float32)[:, None]


class LabeledRows(IndexedReader):
    """Rows that are random by the seed, and know their classes."""

    rows, labels = 24, LABELS

    def take(self, indices, seed):
        noise = 0 if seed is None else np.random.default_rng(seed).random()
        return X[indices] + noise / 2, np.zeros(len(indices))

    def subset(self, numbers):
        part = LabeledRows()
        part.rows, part.labels = len(numbers), LABELS[numbers]
        return part


def batches_of_reader(reader, seed, skip=0, size=1):
    return list(reader.batches(size, seed, skip))


@pytest.mark.parametrize("seed", [0, 1, *map(in_sweep, range(2, 10))])
@pytest.mark.parametrize(("classes", "rows"), [(2, 3), (3, 2), (4, 3), (2, 2)])
def test_each_batch_has_p_classes_with_k_rows(seed, classes, rows):
    reader = p_by_k(X, LABELS, classes, rows)
    found = batches_of_reader(reader, seed)
    assert len(found) == reader.count == 24 // (classes * rows)
    for x, y in found:
        assert np.unique(y, return_counts=True)[1].tolist() == [rows] * classes
        assert len(np.unique(x)) == classes * rows
        np.testing.assert_array_equal(LABELS[x[:, 0].astype(int)], y)


def test_classes_and_rows_take_turns():
    """No class is two batches ahead of another, and no row comes again before others of it."""
    reader = p_by_k(X, LABELS, 2, 2)
    classes, rows = [], []
    for x, y in batches_of_reader(reader, 3):
        classes += np.unique(y).tolist()
        rows += x[y == 9, 0].tolist()
    counts = [classes.count(c) for c in (4, 7, 9, 11)]
    assert max(counts) - min(counts) <= 1
    assert len(set(rows)) == len(rows)


def test_order_is_decided_by_the_seed_and_can_be_continued():
    reader = p_by_k(X, LABELS, 2, 2)
    first, again, other = (batches_of_reader(reader, seed) for seed in (1, 1, 2))
    for (x, _), (same, _) in zip(first, again, strict=True):
        np.testing.assert_array_equal(x, same)
    assert any((x != y).any() for (x, _), (y, _) in zip(first, other, strict=True))
    rest = batches_of_reader(reader, 1, skip=4)
    assert len(rest) == 2
    for (x, _), (same, _) in zip(first[4:], rest, strict=True):
        np.testing.assert_array_equal(x, same)


def test_evaluations_have_all_rows_in_their_order():
    found = batches_of_reader(p_by_k(X, LABELS, 2, 2), None, skip=1, size=10)
    assert [len(y) for _, y in found] == [10, 4]
    np.testing.assert_array_equal(np.concatenate([x for x, _ in found]), X[10:])


def test_readers_and_dicts():
    reader = p_by_k(LabeledRows(), classes=2, rows=3)
    x, y = batches_of_reader(reader, 5)[0]
    assert (x % 1 > 0).all()  # random by the seed
    np.testing.assert_array_equal(LABELS[x[:, 0].astype(int)], y)
    x, y = batches_of_reader(p_by_k({"a": X, "b": 2 * X}, LABELS, 2, 3), 5)[0]
    np.testing.assert_array_equal(x["b"], 2 * x["a"])


@pytest.mark.parametrize("data", [X, LabeledRows()])
def test_subsets(data):
    part = p_by_k(data, LABELS, 2, 3).subset(np.arange(3, 20))
    x, y = batches_of_reader(part, None, size=17)[0]
    np.testing.assert_array_equal(y, LABELS[3:20])
    if data is X:
        np.testing.assert_array_equal(x, X[3:20])


def test_part_of_the_rows_is_evaluated():
    """They may be too few for P classes with K rows, which a training needs."""
    part = p_by_k(X, LABELS, 4, 3).subset(np.array([0, 4, 9, 10]))
    assert [y.tolist() for _, y in batches_of_reader(part, None, size=4)] == [[4, 7, 9, 9]]
    with pytest.raises(ValueError, match=r"classes=4.* 3"):
        batches_of_reader(part, 0)


def test_description_changes_with_the_data():
    described = [
        p_by_k(*arguments).describe()
        for arguments in ((X, LABELS, 2, 3), (X, LABELS, 3, 2), (2 * X, LABELS, 2, 3))
    ]
    assert all(one != other for one, other in pairwise(described))
    assert p_by_k(X, LABELS, 2, 3).describe() == described[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((X, LABELS, 5, 2), r"classes=5.* 4"),
        ((X, LABELS, 1, 2), "classes=1"),
        ((X, LABELS, 2, 4), r"rows=4 .*class 4"),
        ((X, LABELS, 2, 1), "rows=1"),
        ((X, LABELS[:5], 2, 2), "24 rows"),
        ((X, LABELS + 0.5, 2, 2), "one integer"),
        ((X, None, 2, 2), "no labels"),
    ],
)
def test_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        p_by_k(*arguments)
