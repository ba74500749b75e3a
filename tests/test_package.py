"""The package as a whole: what importing it costs, and that its documents tell the truth."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from packaging.requirements import Requirement
from pyarrow import parquet

import onnxgrad
from onnxgrad import DerivativeOptions, onnx_derivative
from tests.support.pages import code_of
from tests.support.paths import DOCS, ROOT
from tests.support.running import in_sweep

HEAVY = "numpy onnx onnx_ir onnxruntime matplotlib pyarrow rich typer sklearn torch".split()
PLACES = (
    "*.md *.toml *.yml docs/**/*.md docs/**/*.rst docs/**/*.py examples/**/*.md examples/**/*.rst"
    " examples/**/*.py src/**/*.py src/**/*.html tests/**/*.py"
)
TEXTS = sorted(
    path
    for place in PLACES.split()
    for path in ROOT.glob(place)
    if not path.relative_to(ROOT).as_posix().startswith("docs/auto_")  # copies of the galleries
)
BANNED = re.compile(
    r"/(?:home|root|tmp|work|Users)/\w|\b(?:TODO|FIXME|blazing\w*|seamless\w*|effortless\w*"
    r"|cutting[- ]edge|state[- ]of[- ]the[- ]art|revolutionary|game[- ]chang\w*|world[- ]class)\b",
    re.IGNORECASE,
)
BRITISH = re.compile(
    r"\w*(?:colour|neighbour|behaviour|favour|honour|artefact|catalogue|judgement|learnt|licence|whilst"
    r"|labelled(?!by)|labelling|modelled|modelling|cancelled|travelled|\bcentre|\bgrey\b|\btowards\b"
    r"|(?:optim|initial|normal|maxim|minim|recogn|general|visual|organ|serial|special|quant|standard"
    r"|summar|regular|real|util|custom|penal|parallel|vector|linear|local|final)is(?:e|ing|ation)"
    r"|analys(?:ed|ing))\w*",
    re.IGNORECASE,
)
README = (ROOT / "README.md").read_text()


def python(*arguments: str, cwd: Path | None = None) -> str:
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


# -- the package ------------------------------------------------------------------------------


def test_import_is_light():
    code = f"import sys, onnxgrad; print([m for m in {HEAVY} if m in sys.modules])"
    assert python("-c", code).strip() == "[]"


FIT = """
import sys
import numpy as np, onnx, onnxgrad as og
model = onnx.parser.parse_model(\"\"\"
    <ir_version: 9, opset_import: ["": 20]>
    f (float[N,2] x) => (float[N,1] y) <float[2,1] w = {1.0, 2.0}> { y = MatMul(x, w) }\"\"\")
X, y = np.ones((10, 2), np.float32), np.ones((10, 1), np.float32)
trainer = og.Trainer(model, "squared_error").fit(X, y, validation=(X, y))
trainer.predict(X)
og.OrtGradientOptimizer(og.add_loss_output(model), max_iter=1).fit(X, y)
og.OrtGradientForwardBackwardOptimizer(model, max_iter=1).fit(X, y)
og.onnx_derivative(model)
"""


def test_a_training_imports_little():
    """Each of these takes longer to import than all that a training needs, or about as long."""
    heavy = "matplotlib pandas pyarrow rich scipy sklearn sympy torch typer".split()
    code = f"{FIT}\nprint([m for m in {heavy} if m in sys.modules])"
    assert python("-c", code).strip() == "[]"


def test_symbols_of_onnx_ir_have_their_arithmetic():
    code = f"{FIT}\nimport onnx_ir as ir; print((ir.SymbolicDim('N') + 1).simplify().value)\n"
    code += "import sympy; print(sympy.simplify('n + n'), ir._core.sympy.Expr is sympy.Expr)"
    assert python("-c", code).split("\n")[:2] == ["N + 1", "2*n True"]


def test_help_is_light():
    slow = [m for m in HEAVY if m not in ("rich", "typer")]
    code = f"import sys, onnxgrad.cli; print([m for m in {slow} if m in sys.modules])"
    assert python("-c", code).strip() == "[]"


def test_scikit_learn_and_torch_are_not_needed():
    code = (
        "import sys; sys.modules.update(sklearn=None, torch=None, skl2onnx=None)\n"
        "import onnxgrad; [getattr(onnxgrad, name) for name in onnxgrad.__all__]\n"
        "from onnxgrad import *"
    )
    python("-c", code)
    code = "import sys; sys.modules['sklearn'] = None\nimport onnxgrad\n"
    code += "try: onnxgrad.OnnxClassifier\nexcept ImportError as e: print(e)"
    assert "pip install 'onnxgrad[sklearn]'" in python("-c", code)


def test_names():
    assert onnxgrad.__all__ == sorted(onnxgrad.__all__)
    assert set(onnxgrad.__all__) <= set(dir(onnxgrad))


@pytest.mark.parametrize("name", onnxgrad.__all__)
def test_name_is_documented(name):
    assert (getattr(onnxgrad, name).__doc__ or "").strip()


def test_unknown_name():
    with pytest.raises(AttributeError, match="No onnxgrad attribute nothing"):
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
    assert headings[:2] == ["Unreleased", version]


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
    assert {p.suffix for p in (ROOT / "src").rglob("*") if p.is_file()} <= {
        ".css",
        ".html",
        ".py",
        ".pyc",
        ".pyi",
        ".typed",
    }
    wheel = importlib.metadata.distribution("onnxgrad").read_text("WHEEL")
    assert wheel is not None
    assert "Root-Is-Purelib: true" in wheel
    assert "Tag: py3-none-any" in wheel


def test_a_suite_that_finds_no_case_fails(tmp_path):
    (tmp_path / "test_nothing.py").write_text(
        "import pytest\n\n@pytest.mark.parametrize('case', [])\ndef test(case):\n    pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", tmp_path]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == pytest.ExitCode.INTERRUPTED, done.stdout
    assert "Empty parameter set in 'test'" in done.stdout


# -- extras ------------------------------------------------------------------------------------

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {
    extra: {Requirement(text).name.lower() for text in texts}
    for extra, texts in PROJECT["optional-dependencies"].items()
    if extra not in ("bench", "docs", "release", "test")
}
OF_DEPENDENCIES = {"google", "ml_dtypes", "markupsafe", "click"}  # which these cannot do without
NOTEBOOKS = {"IPython"}  # imported only where it runs already
DISTRIBUTIONS = {"PIL": "pillow", "sklearn": "scikit-learn", "yaml": "pyyaml"}


def calls_and_imports() -> tuple[list[ast.Call], set[str]]:
    calls, imported = [], set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                calls.append(node)
            elif isinstance(node, ast.Import):
                imported |= {name.name.partition(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(str(node.module).partition(".")[0])
    return calls, imported


def test_each_optional_import_has_an_extra():
    """A module that is no dependency is in an extra; and no extra is left without an import."""
    calls, imported = calls_and_imports()
    dependencies = {Requirement(text).name.replace("-", "_") for text in PROJECT["dependencies"]}
    known = {*sys.stdlib_module_names, "onnxgrad", *dependencies, *OF_DEPENDENCIES, *NOTEBOOKS}
    found = {DISTRIBUTIONS.get(m, m).replace("_", "-") for m in imported - known}
    found |= {name.lower() for name, _ in named_extras(calls)}  # of callbacks: by `optional`
    assert found == set().union(*EXTRAS.values())


def named_extras(calls: list[ast.Call]) -> list[tuple[str, str]]:
    """Return the package and the extra that each error of a missing package names."""
    named = []
    for call in calls:
        words = [getattr(a, "value", None) for a in call.args]
        if getattr(call.func, "id", "") == "not_installed" and isinstance(words[1], str):
            named.append((words[1], words[2]))
        elif getattr(call.func, "id", "") == "optional":
            named.append((words[2], words[1]))
    return named


def test_errors_of_missing_packages_name_the_extra_that_installs_them():
    named = named_extras(calls_and_imports()[0])
    assert len(named) > 12
    assert [pair for pair in named if pair[0].lower() not in EXTRAS.get(pair[1], ())] == []


def test_the_page_lists_each_extra():
    page = (DOCS / "install.md").read_text()
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|.*\d.* [MG]B.*\|$", page, re.MULTILINE)
    assert sorted(re.findall(r"\w+", " ".join(rows))) == sorted(EXTRAS)


def test_commands_that_install_name_extras():
    """In pages, errors and examples, the extras of `pip install` exist."""
    found = 0
    for path in TEXTS:
        for names in re.findall(
            r"pip install [^`\n]*?(?:onnxgrad|\.)\[([a-z,]+)\]", path.read_text()
        ):
            found += 1
            assert set(names.split(",")) <= set(PROJECT["optional-dependencies"]), path
    assert found > 8


# -- the documents ----------------------------------------------------------------------------


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_words(path):
    text = path.read_text()
    if path == Path(__file__):
        text = text[text.index("README = ") :]  # without the list itself
    assert [found.group() for found in BANNED.finditer(text)] == []
    assert BRITISH.findall(text) == []  # spelling is American


@pytest.mark.parametrize("path", [p for p in TEXTS if p.suffix == ".md"], ids=lambda p: p.name)
def test_links(path):
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text()):
        assert link.startswith("https://") or (path.parent / link).exists(), link


def code_blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_readme_example(tmp_path):
    [code] = code_blocks(README, "python")
    (tmp_path / "data").symlink_to(ROOT / "data")
    printed = python("-c", code, cwd=tmp_path)
    first, last = map(float, printed.split())
    assert first > 0.3  # the loss of the first epoch
    assert last > 0.95  # the accuracy
    assert np.mean(predicted(tmp_path / "trained.onnx") == digits()[1]) > 0.95


def digits() -> tuple[np.ndarray, np.ndarray]:
    table = parquet.read_table(ROOT / "data" / "digits.parquet")
    images = np.stack([table[f"pixel_{i}"] for i in range(64)], axis=1)
    return images.reshape(-1, 1, 8, 8), table["label"].to_numpy()


def predicted(path: Path) -> np.ndarray:
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(None, {"image": digits()[0]})[0].argmax(axis=1)


@pytest.mark.parametrize("seed", [0, *map(in_sweep, range(1, 5))])
def test_readme_main_command(seed, tmp_path):
    [line] = re.findall(r"^python3 -m venv .*onnxgrad train .*$", README, re.MULTILINE)
    arguments = shlex.split(line.rpartition("onnxgrad ")[2])
    (tmp_path / "data").symlink_to(ROOT / "data")
    printed = python("-m", "onnxgrad", *arguments, "--seed", str(seed), cwd=tmp_path)
    [row] = re.findall(r"validation accuracy.*%.*", printed)
    accuracy = re.findall(r"([\d.]+)%", row)[-1]  # of the last epoch, behind that of others
    [stated] = re.findall(r"validation accuracy of (\d+) to (\d+) %", README)
    assert int(stated[0]) <= round(float(accuracy)) <= int(stated[1])
    before, after = (onnx.load(p) for p in (ROOT / arguments[1], tmp_path / arguments[-1]))
    assert list(after.graph.node) == list(before.graph.node)
    assert np.mean(predicted(tmp_path / arguments[-1]) == digits()[1]) > 0.97


def test_readme_commands_of_the_command_line():
    printed = python("-m", "onnxgrad", "--help")
    commands = re.findall(r"^onnxgrad (\w+)", README, re.M)
    assert commands
    assert all(command in printed for command in commands)


def test_docs_example():
    [code] = code_of("gradients.md")
    lines = python("-c", code).splitlines()
    assert lines == ["['X', 'W', 'Y_grad']", "['X_grad', 'W_grad']", "['X_grad', 'W_grad', 'Y']"]


# -- the table of kinks -----------------------------------------------------------------------


def kinks() -> list:
    text = (DOCS / "kinks.md").read_text()
    rows = re.findall(r"^\| `(.*)` \| (.*) \| (.*) \| `(.*)` \| (.*) \|$", text, re.MULTILINE)
    assert len(rows) > 30
    return [pytest.param(*row, id=f"{row[0]} at {row[1]}") for row in rows]


def numbers(text: str) -> np.ndarray:
    found = np.float32([float(n) for n in text.split(",")])
    return found if len(found) > 1 else found.reshape(())


def point(node: str, at: str) -> dict[str, np.ndarray]:
    values = {x: numbers(v) for x, v in (part.split("=") for part in at.split(";"))}
    values = {x.strip(): v for x, v in values.items()}
    return {x: v[None, None] if "Pool" in node else v for x, v in values.items()}


def assert_slopes(found, stated: str):
    wanted = [np.ravel(numbers(part)) for part in stated.split(";")]
    for slope, expected in zip(found, wanted, strict=True):
        np.testing.assert_allclose(np.ravel(slope), expected, rtol=1e-4)


@pytest.mark.parametrize(("node", "at", "slopes", "theirs", "their_slopes"), kinks())
def test_kink(node, at, slopes, theirs, their_slopes):
    feed = point(node, at)
    inputs = ", ".join(f"float[{','.join(map(str, v.shape))}] {x}" for x, v in feed.items())
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 20]> g ({inputs}) => (float y) {{ y = {node} }}'
    )
    model.graph.output[0].type.tensor_type.ClearField("shape")
    options = DerivativeOptions.FillGrad | DerivativeOptions.KeepOutputs
    gradient = onnx_derivative(model, options=options).SerializeToString()
    session = ort.InferenceSession(gradient, providers=["CPUExecutionProvider"])
    assert_slopes(session.run([f"{x}_grad" for x in feed], feed), slopes)


@pytest.mark.parametrize(("node", "at", "slopes", "theirs", "their_slopes"), kinks())
def test_kink_in_torch(node, at, slopes, theirs, their_slopes):
    torch = pytest.importorskip("torch")
    tensors = {x: torch.tensor(v, requires_grad=True) for x, v in point(node, at).items()}
    names = {"torch": torch, "F": torch.nn.functional}
    y = eval(theirs, names | tensors)  # of our own document
    assert_slopes(torch.autograd.grad(y.sum(), list(tensors.values())), their_slopes)
    differs = slopes != their_slopes
    assert differs == (node == "Pow(a, b)" and "nan" in their_slopes)
