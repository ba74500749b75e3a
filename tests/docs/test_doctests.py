"""Every public name is documented by an example that runs, and is on one page of the API."""

import doctest
import inspect
import re

import numpy as np
import pytest

import onnxgrad
from onnxgrad.autodiff.forms import GRADIENT
from onnxgrad.graph import rewrite
from tests.support.paths import DOCS, PACKAGE, ROOT
from tests.support.public_names import (
    names_of_stub,
    public_objects,
    public_places,
    resolve_name,
    submodules,
)

MOST_AT_THE_ROOT = 58  # names, submodules included

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


def own_places() -> list[str]:
    """Return the public names outside of `tasks`, each object by one of them."""
    seen, places = set(), []
    for place in sorted(public_places(), key=lambda place: (place.count("."), place)):
        name = place.rpartition(".")[2]
        if name not in seen | WITHOUT_DOCSTRING and not place.startswith("tasks."):
            places.append(place)
        seen.add(name)
    return places


@pytest.mark.parametrize("place", own_places())
def test_example(place, tmp_path, monkeypatch):
    name = place.rpartition(".")[2]
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    monkeypatch.chdir(tmp_path)
    run_examples(resolve_name(place), name)


@pytest.mark.parametrize("name", sorted(onnxgrad.tasks.__all__))
def test_example_of_a_task(name):
    needs = {"tokens": ("tokenizers", "seqeval"), "ctc": ("rapidfuzz",)}
    needs |= dict.fromkeys(["Texts", "TextLabels", "text_labels"], ("tokenizers",))
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


def test_example_of_the_function_of_jax():
    pytest.importorskip("jax")
    from onnxgrad.jax import function

    run_examples(function, "function")


def test_example_of_the_operation_of_pytensor():
    pytest.importorskip("pytensor")
    from onnxgrad.pytensor import OnnxOp

    run_examples(OnnxOp, "OnnxOp")


def test_what_contributing_adds(monkeypatch):
    group = rewrite.GROUPS[GRADIENT]
    monkeypatch.setitem(group, ("", "Neg"), list(group["", "Neg"]))
    path = str(ROOT / "CONTRIBUTING.md")
    failures, count = doctest.testfile(path, module_relative=False, optionflags=FLAGS)
    assert not failures
    assert count > 10


def documented_places() -> list[str]:
    """Return what the pages of the API document, such as "onnxgrad.optimizers.adamw"."""
    places = []
    for page in sorted((DOCS / "api").glob("*.rst")):
        blocks = re.findall(r"^\.\. api::( [\w.]+)?\n((?:\n|   \w+\n)+)", page.read_text(), re.M)
        places += [
            f"{module.strip() or 'onnxgrad'}.{name}"
            for module, names in blocks
            for name in names.split()
        ]
    return places


def test_every_public_object_is_on_one_page():
    for library in ("sklearn", "torch", "jax", "pytensor"):
        pytest.importorskip(library)
    tasks = {n: m for n, m in vars_of_tasks().items() if inspect.ismodule(m)}
    expected = [f"tasks.{n}.{own}" for n, module in tasks.items() for own in module.__all__]
    classes = [f"tasks.{name}" for name, own in vars_of_tasks().items() if inspect.isclass(own)]
    expected += [*classes, "torch.OnnxModule"]
    expected += ["jax.function", "jax.ModelFunction", "pytensor.OnnxOp"]
    expected += [p for p in public_objects() if not p.startswith("tasks.")]
    found = [place.removeprefix("onnxgrad.") for place in documented_places()]
    assert len(found) == len(set(found))
    by_object = {id(resolve_name(place)) for place in expected}
    assert {id(resolve_name(place)) for place in found} == by_object
    assert len(found) == len(by_object)


def vars_of_tasks() -> dict[str, object]:
    return {name: getattr(onnxgrad.tasks, name) for name in onnxgrad.tasks.__all__}


def test_every_submodule_has_a_page():
    pages = "".join(path.read_text() for path in (DOCS / "api").glob("*.rst"))
    for name in submodules():
        assert pages.count(f"\n.. py:module:: onnxgrad.{name}\n") == 1


def test_every_page_is_in_the_navigation():
    found = re.findall(r"^api/(\w+)$", (DOCS / "api.md").read_text(), re.M)
    found += re.findall(r"^   (\w+)$", toctree_of((DOCS / "api" / "train.rst").read_text()), re.M)
    assert sorted(found) == sorted(path.stem for path in (DOCS / "api").glob("*.rst"))


def toctree_of(page: str) -> str:
    return page[page.index(".. toctree::") :]


def test_every_method_of_a_trainer_is_on_one_page():
    """Or in the list of attributes of the class."""
    pages = "".join(path.read_text() for path in sorted((DOCS / "api").glob("*.rst")))
    for owner in (onnxgrad.Trainer, onnxgrad.TrainerStack):
        name = re.escape(owner.__name__)
        blocks = re.findall(rf"^\.\. methods:: {name}\n((?:\n|   \w+\n)+)", pages, re.M)
        shown = [each for block in blocks for each in block.split()]
        assert len(shown) == len(set(shown))
        described = re.findall(r"^    (\w+): ", inspect.getdoc(owner).split("Attributes:")[1], re.M)
        public = {each for each in dir(owner) if not each.startswith("_")}
        if owner is onnxgrad.TrainerStack:
            public -= {each for each in dir(onnxgrad.Trainer) if each not in ("model", "save")}
        assert public - {*shown, *described} == set()


# -- where names are -------------------------------------------------------------------------------


def test_the_root_is_small():
    assert len(names_of_stub()) <= MOST_AT_THE_ROOT


@pytest.mark.parametrize("name", submodules())
def test_names_of_a_submodule_are_those_of_its_stub(name):
    module, names = submodules()[name], names_of_stub(name)
    assert module.__all__ == sorted(names)
    assert set(names) <= set(dir(module))
    files = {path.stem for path in (PACKAGE / name).iterdir() if path.suffix == ".py"}
    assert name == "tasks" or files.isdisjoint(names)  # a file would hide the name that it has
    assert all(hasattr(module, each) for each in names)


def test_the_root_says_where_a_name_is():
    moved = [place for place in public_places() if place.rpartition(".")[2] not in names_of_stub()]
    assert len(moved) > 150
    for place in moved:
        with pytest.raises(
            AttributeError, match=rf"'{place.rpartition('.')[2]}'.* onnxgrad\.{place}\b"
        ):
            getattr(onnxgrad, place.rpartition(".")[2])


def test_names_that_a_submodule_shares_are_one_object():
    for place in public_places():
        module, _, name = place.rpartition(".")
        if module and name in names_of_stub():
            assert resolve_name(place) is getattr(onnxgrad, name)
