"""Explanations: the documented examples run, and what cannot be explained is refused."""

from __future__ import annotations

import doctest

import matplotlib.pyplot as plt
import pytest

from onnxgrad import explain

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.mark.parametrize("name", explain.__all__)
def test_example(name):
    plt.switch_backend("Agg")
    tests = doctest.DocTestFinder(recurse=False).find(getattr(explain, name), name, globs={})
    assert tests
    assert tests[0].examples
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    runner.run(tests[0])
    assert not runner.failures
