"""The package as a whole: what importing it costs, and that its documents tell the truth."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import shlex
import subprocess
import sys
import tomllib

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from packaging.requirements import Requirement
from pyarrow import parquet

import onnxgrad
from onnxgrad import DerivativeOptions, onnx_derivative
from tests.support.commands import run_command, succeed
from tests.support.models import parse_model
from tests.support.pages import code_of
from tests.support.paths import DOCS, ROOT
from tests.support.public_names import public_objects, submodules
from tests.support.running import in_sweep, run_named
from tests.support.source_nodes import imports_and_calls

HEAVY = "numpy onnx onnx_ir onnxruntime matplotlib pyarrow rich typer sklearn torch jax".split()
README = (ROOT / "README.md").read_text()


def python_output(*lines: str) -> list[str]:
    """Return the lines that code prints in a process of its own."""
    command = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


# -- the package ------------------------------------------------------------------------------


def test_importing_is_light_also_for_the_help_of_the_shell():
    slow = [m for m in HEAVY if m not in ("rich", "typer")]
    assert python_output(
        f"import sys, onnxgrad; print([m for m in {HEAVY} if m in sys.modules])",
        f"import onnxgrad.cli; print([m for m in {slow} if m in sys.modules])",
    ) == ["[]", "[]"]


def test_modules_of_the_shell_are_exempt_from_garbage_collections():
    assert python_output(
        "import gc; before = gc.get_freeze_count()",
        "import onnxgrad.cli; print(gc.get_freeze_count() > before, gc.isenabled())",
    ) == ["True True"]


FIT = """
import sys
import numpy as np, onnx, onnxgrad as og
model = onnx.parser.parse_model(\"\"\"
    <ir_version: 9, opset_import: ["": 20]>
    f (float[N,2] x) => (float[N,1] y) <float[2,1] w = {1.0, 2.0}> { y = MatMul(x, w) }\"\"\")
X, y = np.ones((10, 2), np.float32), np.ones((10, 1), np.float32)
trainer = og.Trainer(model, "squared_error").fit(X, y, validation=(X, y))
trainer.predict(X)
og.compat.OrtGradientOptimizer(og.add_loss_output(model), max_iter=1).fit(X, y)
og.compat.OrtGradientForwardBackwardOptimizer(model, max_iter=1).fit(X, y)
og.onnx_derivative(model)
"""


def test_a_training_imports_little():
    """Each of these takes longer to import than all that a training needs, or about as long."""
    heavy = "matplotlib pandas pyarrow rich scipy sklearn sympy torch typer".split()
    assert python_output(
        FIT,
        f"print([m for m in {heavy} if m in sys.modules])",
        # symbols of onnx_ir have their arithmetic nevertheless
        "import onnx_ir as ir; print((ir.SymbolicDim('N') + 1).simplify().value)",
        "import sympy; print(sympy.simplify('n + n'), ir._core.sympy.Expr is sympy.Expr)",
    ) == ["[]", "N + 1", "2*n True"]


def test_scikit_learn_and_torch_are_not_needed():
    [message] = python_output(
        "import sys; sys.modules.update(sklearn=None, torch=None, skl2onnx=None)",
        "import onnxgrad; [getattr(onnxgrad, name) for name in onnxgrad.__all__]",
        "from onnxgrad import *",
        "try: onnxgrad.OnnxClassifier\nexcept ImportError as e: print(e)",
    )
    assert "pip install 'onnxgrad[sklearn]'" in message


def test_names():
    assert onnxgrad.__all__ == sorted(onnxgrad.__all__)
    assert set(onnxgrad.__all__) <= set(dir(onnxgrad))


def test_names_are_documented():
    things = public_objects() | submodules()
    assert [n for n, thing in things.items() if not (thing.__doc__ or "").strip()] == []


def test_unknown_name():
    with pytest.raises(AttributeError, match=r"'nothing'$"):
        onnxgrad.nothing  # noqa: B018


def test_version():
    """It is stated once, in `__init__.py`; CITATION.cff and the changelog repeat it."""
    version = onnxgrad.__version__
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in project["project"]["dynamic"]
    source = ROOT / project["tool"]["hatch"]["version"]["path"]
    assert re.findall(r'(?m)^__version__ = "(.*)"$', source.read_text()) == [version]
    assert importlib.metadata.version("onnxgrad") == version
    cited = re.findall(r"(?m)^version: (.*)$", (ROOT / "CITATION.cff").read_text())
    assert cited == [version]
    headings = re.findall(r"(?m)^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text())
    assert version in headings[:2]  # below what is not yet released


def test_authors_and_license():
    """The metadata, LICENSE and CITATION.cff name the same."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = (ROOT / "CITATION.cff").read_text()
    [author] = [a["name"] for a in project["authors"]]
    assert f"  - name: {author}\n" in citation
    assert author in (ROOT / "LICENSE").read_text()
    assert f"license: {project['license']}\n" in citation


def test_readme_of_the_package_index():
    """No link of it leads to a file of the repository, which is not there."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]
    [rule] = settings["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]
    text = re.sub(rule["pattern"], rule["replacement"], README)
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert all(link.startswith("https://") for link in links)
    assert "](docs/" in README  # there are some to replace
    assert code_blocks(text, "python") == code_blocks(README, "python")


def test_pure_python():
    wheel = importlib.metadata.distribution("onnxgrad").read_text("WHEEL")
    assert wheel is not None
    assert "Root-Is-Purelib: true" in wheel
    assert "Tag: py3-none-any" in wheel


def test_a_suite_that_finds_no_case_fails(pytestconfig):
    assert pytestconfig.getini("empty_parameter_set_mark") == "fail_at_collect"


# -- extras ------------------------------------------------------------------------------------

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {
    extra: {Requirement(text).name.lower() for text in texts}
    for extra, texts in PROJECT["optional-dependencies"].items()
    if extra not in ("bench", "docs", "release", "test")
}
OF_DEPENDENCIES = {"google", "ml_dtypes", "markupsafe", "click"}  # which these cannot do without
NOTEBOOKS = {"IPython"}  # imported only where it runs already
OF_USERS = {"pymc"}  # an extra installs it for its users, and the package imports pytensor only
DISTRIBUTIONS = {"PIL": "pillow", "sklearn": "scikit-learn", "yaml": "pyyaml"}


def imported_packages() -> set[str]:
    found = set()
    for node in (node for nodes in imports_and_calls().values() for node in nodes):
        if isinstance(node, ast.Import):
            found |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module).partition(".")[0])
    return found


def test_each_optional_import_has_an_extra():
    """A module that is no dependency is in an extra; and no extra is left without an import."""
    dependencies = {Requirement(text).name.replace("-", "_") for text in PROJECT["dependencies"]}
    known = {*sys.stdlib_module_names, "onnxgrad", *dependencies, *OF_DEPENDENCIES, *NOTEBOOKS}
    found = {DISTRIBUTIONS.get(m, m).replace("_", "-") for m in imported_packages() - known}
    found |= {name.lower() for name, _ in named_extras()}  # of callbacks: by `module_importer`
    assert found == set().union(*EXTRAS.values()) - OF_USERS


def named_extras() -> list[tuple[str, str]]:
    """Return the package and the extra that each error of a missing package names."""
    named = []
    for call in (node for nodes in imports_and_calls().values() for node in nodes):
        if not isinstance(call, ast.Call):
            continue
        words = [getattr(a, "value", None) for a in call.args]
        if getattr(call.func, "id", "") == "not_installed" and isinstance(words[1], str):
            named.append((words[1], words[2]))
        elif getattr(call.func, "id", "") == "module_importer":
            named.append((words[2], words[1]))
    return named


def test_errors_of_missing_packages_name_the_extra_that_installs_them():
    named = named_extras()
    assert len(named) > 12
    assert [pair for pair in named if pair[0].lower() not in EXTRAS.get(pair[1], ())] == []


def test_the_page_lists_each_extra():
    page = (DOCS / "install.md").read_text()
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|.*\d.* [MG]B.*\|$", page, re.MULTILINE)
    assert sorted(re.findall(r"\w+", " ".join(rows))) == sorted(EXTRAS)


# -- the documents ----------------------------------------------------------------------------


def code_blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder_of_readme(tmp_path, monkeypatch):
    """An empty folder with the data of the repository, where the code of README runs."""
    (tmp_path / "data").symlink_to(ROOT / "data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_readme_example(folder_of_readme, capsys):
    [code] = code_blocks(README, "python")
    exec(code, {})
    first, last = map(float, capsys.readouterr().out.split())
    assert first > 0.3  # the loss of the first epoch
    assert last > 0.95  # the accuracy
    assert np.mean(predicted_digits("trained.onnx") == digits()[1]) > 0.95


def digits() -> tuple[np.ndarray, np.ndarray]:
    table = parquet.read_table(ROOT / "data" / "digits.parquet")
    images = np.stack([table[f"pixel_{i}"] for i in range(64)], axis=1)
    return images.reshape(-1, 1, 8, 8), table["label"].to_numpy()


def predicted_digits(path: str) -> np.ndarray:
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(None, {"image": digits()[0]})[0].argmax(axis=1)


@pytest.mark.parametrize("seed", [0, *map(in_sweep, range(1, 5))])
def test_readme_main_command(seed, folder_of_readme):
    [line] = re.findall(r"^python3 -m venv .*onnxgrad train .*$", README, re.MULTILINE)
    arguments = shlex.split(line.rpartition("onnxgrad ")[2])
    printed = succeed(*arguments, "--seed", seed).stdout
    [row] = re.findall(r"validation accuracy.*%.*", printed)
    accuracy = re.findall(r"([\d.]+)%", row)[-1]  # of the last epoch, behind that of others
    [stated] = re.findall(r"validation accuracy of (\d+) to (\d+) %", README)
    assert int(stated[0]) <= round(float(accuracy)) <= int(stated[1])
    before, after = onnx.load(arguments[1]), onnx.load(arguments[-1])
    assert list(after.graph.node) == list(before.graph.node)
    assert np.mean(predicted_digits(arguments[-1]) == digits()[1]) > 0.97


def test_readme_commands_of_the_command_line():
    printed = run_command("--help").stdout
    commands = re.findall(r"^\$ onnxgrad (\w+)", README, re.M)
    assert commands
    assert all(command in printed for command in commands)


def test_docs_example(capsys):
    code, *_ = code_of("derivatives.md")
    exec(code, {})
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["['X', 'W', 'Y_grad']", "['X_grad', 'W_grad']", "['X_grad', 'W_grad', 'Y']"]


# -- the table of kinks -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def kinks() -> list[tuple[str, ...]]:
    """The rows of the page: a node, a point, slopes; a function of PyTorch, and its slopes."""
    text = (DOCS / "kinks.md").read_text()
    rows = re.findall(r"^\| `(.*)` \| (.*) \| (.*) \| `(.*)` \| (.*) \|$", text, re.MULTILINE)
    assert len(rows) > 30
    return rows


def stated_numbers(text: str) -> np.ndarray:
    found = np.float32([float(n) for n in text.split(",")])
    return found if len(found) > 1 else found.reshape(())


def stated_point(node: str, at: str) -> dict[str, np.ndarray]:
    named = (part.split("=") for part in at.split(";"))
    values = {x.strip(): stated_numbers(v) for x, v in named}
    return {x: v[None, None] if "Pool" in node else v for x, v in values.items()}


def assert_slopes(found, stated: str, row: str):
    for slope, expected in zip(found, map(stated_numbers, stated.split(";")), strict=True):
        np.testing.assert_allclose(np.ravel(slope), np.ravel(expected), rtol=1e-4, err_msg=row)


def test_kinks_are_those_of_the_page(kinks):
    options = DerivativeOptions.FillGrad | DerivativeOptions.KeepOutputs
    for node, at, slopes, _, _ in kinks:
        feed = stated_point(node, at)
        inputs = ", ".join(f"float[{','.join(map(str, v.shape))}] {x}" for x, v in feed.items())
        text = f"g ({inputs}) => (float y) {{ y = {node} }}"
        model = parse_model(text, opset=20, ir_version=10, output_shapes=False)
        found = run_named(onnx_derivative(model, options=options), feed)
        assert_slopes([found[f"{x}_grad"] for x in feed], slopes, f"{node} at {at}")


def test_kinks_of_torch_are_those_of_the_page(kinks):
    torch = pytest.importorskip("torch")
    for node, at, slopes, theirs, their_slopes in kinks:
        tensors = {
            x: torch.tensor(v, requires_grad=True) for x, v in stated_point(node, at).items()
        }
        names = {"torch": torch, "F": torch.nn.functional}
        y = eval(theirs, names | tensors)  # of our own document
        found = torch.autograd.grad(y.sum(), list(tensors.values()))
        assert_slopes(found, their_slopes, f"{node} at {at}")
        differs = slopes != their_slopes
        assert differs == (node == "Pow(a, b)" and "nan" in their_slopes), node
