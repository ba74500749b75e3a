"""Every public name is documented by an example that runs, and is on one page of the API."""

import doctest
import re
from importlib import import_module

import numpy as np
import pytest

import onnxgrad
from onnxgrad.autodiff.forms import GRADIENT
from onnxgrad.graph import rewrite
from tests.support.paths import DOCS, ROOT

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
WITHOUT_DOCSTRING = {"LOSSES"}  # a dict
NEEDS = {"OnnxClassifier": "sklearn", "OnnxRegressor": "sklearn", "texts": "tokenizers"}
NEEDS |= {
    "MeanAveragePrecision": "pycocotools",
    "labeled_texts": "tokenizers",
    "paired_texts": "tokenizers",
}
NEEDS |= {"generate": "tokenizers", "TextErrorRate": "rapidfuzz", "EntityF1": "seqeval"}
NEEDS |= dict.fromkeys(
    ["annotated_images", "image_size", "letterbox", "list_images", "masked_images", "open_image"],
    "PIL",
)


def run_examples(thing, name: str) -> None:
    tests = doctest.DocTestFinder().find(thing, name, globs={})
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    own = next((test for test in tests if test.name == name), None)
    assert own is not None, f"{name} has no example"
    assert own.examples, f"{name} has no example"
    with np.printoptions(precision=4, suppress=True):
        for test in tests:
            runner.run(test)
    assert not runner.failures


@pytest.mark.parametrize("name", sorted(set(onnxgrad.__all__) - WITHOUT_DOCSTRING))
def test_example(name, tmp_path, monkeypatch):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    monkeypatch.chdir(tmp_path)
    run_examples(getattr(onnxgrad, name), name)


@pytest.mark.parametrize("name", sorted(onnxgrad.tasks.__all__))
def test_example_of_a_task(name):
    needs = {"tokens": ("tokenizers", "seqeval"), "ctc": ("rapidfuzz",)}
    for library in ("PIL", *needs.get(name, ())):
        pytest.importorskip(library)
    thing = getattr(onnxgrad.tasks, name)
    if isinstance(thing, type):
        run_examples(thing, name)
        return
    for own in thing.__all__:
        run_examples(getattr(thing, own), own)


def test_example_of_the_torch_module():
    pytest.importorskip("torch")
    from onnxgrad.torch import OnnxModule

    run_examples(OnnxModule, "OnnxModule")


def test_what_contributing_adds(monkeypatch):
    group = rewrite.GROUPS[GRADIENT]
    monkeypatch.setitem(group, ("", "Neg"), list(group["", "Neg"]))
    path = str(ROOT / "CONTRIBUTING.md")
    failures, count = doctest.testfile(path, module_relative=False, optionflags=FLAGS)
    assert not failures
    assert count > 10


def test_every_name_is_on_one_page():
    listed = []
    for page in (DOCS / "api").glob("*.rst"):
        for names in re.findall(
            r"^\.\. api::(?: onnxgrad\.(?:explain|tasks[\w.]*))?\n((?:\n|   \w+\n)+)",
            page.read_text(),
            re.M,
        ):
            listed += names.split()
    names = {*onnxgrad.__dir__()} - {"explain", "tasks"}  # `__all__` depends on what is installed
    tasks = [
        import_module(f"onnxgrad.tasks.{name}") for name in onnxgrad.tasks.__all__ if name.islower()
    ]
    own = ["Task", *(name for task in tasks for name in task.__all__)]
    assert sorted(listed) == sorted([*names, *onnxgrad.explain.__all__, *own])


def test_every_page_is_in_the_navigation():
    navigation = (DOCS / "api.md").read_text()
    pages = sorted(path.stem for path in (DOCS / "api").glob("*.rst"))
    assert sorted(re.findall(r"^api/(\w+)$", navigation, re.M)) == pages
