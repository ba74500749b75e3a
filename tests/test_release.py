"""What a release consists of beside the package: its files agree, and name what exists."""

from __future__ import annotations

import importlib.util
import json
import re
import tomllib

import pytest
from packaging.requirements import Requirement

import onnxgrad
from tests.support.paths import ROOT

yaml = pytest.importorskip("yaml")

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())
ZENODO = json.loads((ROOT / ".zenodo.json").read_text())
PAPER = (ROOT / "paper.md").read_text()
RECIPE = yaml.safe_load((ROOT / "recipe" / "recipe.yaml").read_text())
CONDA_NAMES = {"matplotlib": "matplotlib-base"}  # without Qt


# -- workflows --------------------------------------------------------------------------------


def steps_of(path) -> list[dict]:
    jobs = yaml.safe_load(path.read_text())["jobs"].values()
    return [step for job in jobs for step in job["steps"]]


@pytest.fixture(scope="module")
def steps() -> list[dict]:
    found = [step for path in WORKFLOWS for step in steps_of(path)]
    assert len(found) > 15
    return found


def test_actions_are_pinned_and_keep_no_credentials(steps):
    used = [step for step in steps if "uses" in step]
    assert all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", step["uses"]) for step in used)
    checkouts = [step for step in used if step["uses"].startswith("actions/checkout@")]
    assert len(checkouts) == 4
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)


def test_commands_of_workflows_have_no_templates_and_name_files_that_exist(steps):
    commands = [step["run"] for step in steps if "run" in step]
    assert not any("${{" in command for command in commands)
    named = re.findall(r"(?<![\w./-])(?:\.ci|docs|tests)\b[\w./-]*", "\n".join(commands))
    assert {".ci/run", "docs"} <= set(named)
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_only_the_upload_of_a_published_release_may_ask_for_a_token():
    asking = {
        (path.name, name)
        for path in WORKFLOWS
        for name, job in yaml.safe_load(path.read_text())["jobs"].items()
        if job.get("permissions", {}).get("id-token") == "write"
    }
    assert asking == {("release.yml", "publish")}
    release = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    assert release[True] == {"release": {"types": ["published"]}}  # "on" is true in YAML 1.1
    assert release["jobs"]["publish"]["environment"] == "pypi"
    for path in WORKFLOWS:
        rights = yaml.safe_load(path.read_text())["permissions"]
        assert rights in ({}, {"contents": "read"}), path.name


def test_settings_of_services_name_extras_and_files_that_exist():
    names = ".readthedocs.yaml .pre-commit-config.yaml Dockerfile .devcontainer/devcontainer.json"
    paths = [*WORKFLOWS, *(ROOT / name for name in names.split())]
    extras = re.findall(r"\.\[([a-z,]+)\]", "\n".join(path.read_text() for path in paths))
    assert (
        set(",".join(extras).split(",")) == {"docs", "test"} <= {*PROJECT["optional-dependencies"]}
    )
    site = yaml.safe_load((ROOT / ".readthedocs.yaml").read_text())
    assert (ROOT / site["sphinx"]["configuration"]).exists()
    [hooks] = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [hook["entry"].split()[0] for hook in hooks["hooks"]] == ["ruff", "ruff", "python"]
    copied = re.findall(r"(?m)^COPY (.*) \S+$", (ROOT / "Dockerfile").read_text())
    kept = re.findall(r"(?m)^!(.*)$", (ROOT / ".dockerignore").read_text())
    assert sorted(" ".join(copied).split()) == sorted(kept)
    json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())


def test_files_of_the_source_distribution_exist():
    targets = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    included = targets["targets"]["sdist"]["include"]
    assert [name for name in included if not list(ROOT.glob(name.lstrip("/")))] == []
    assert targets["targets"]["wheel"]["packages"] == ["src/onnxgrad"]


# -- who, what, under which license -----------------------------------------------------------


def test_citation_archive_paper_and_recipe_agree():
    front = yaml.safe_load(PAPER.split("---\n")[1])
    authors = [author["name"] for author in PROJECT["authors"]]
    assert [author["name"] for author in CITATION["authors"]] == authors
    assert [author["name"] for author in ZENODO["creators"]] == authors
    assert [author["name"] for author in front["authors"]] == authors
    assert CITATION["keywords"] == ZENODO["keywords"] == PROJECT["keywords"]
    assert set(front["tags"]) == {"Python", *PROJECT["keywords"]}
    licenses = {CITATION["license"], ZENODO["license"], RECIPE["about"]["license"]}
    assert licenses == {PROJECT["license"]}
    assert CITATION["title"].lower() == ZENODO["title"].lower() == front["title"].lower()
    assert CITATION["abstract"] == ZENODO["description"]
    assert RECIPE["about"]["summary"] == PROJECT["description"]


def test_recipe_of_conda_forge_has_the_version_and_dependencies_of_the_package():
    context, requirements = RECIPE["context"], RECIPE["requirements"]
    assert context["version"] == str(CITATION["version"]) == onnxgrad.__version__
    assert PROJECT["requires-python"] == f">={context['python_min']}"
    needed = {r.name: r for r in map(Requirement, PROJECT["dependencies"])}
    stated = {"python >=${{ python_min }}"} | {
        f"{CONDA_NAMES.get(name, name)} {','.join(sorted(map(str, r.specifier), reverse=True))}"
        for name, r in needed.items()
    }
    assert set(requirements["run"]) == stated
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    host = {f"{r.name} {r.specifier}" for r in map(Requirement, built)}
    assert host <= set(requirements["host"])
    [command] = RECIPE["build"]["python"]["entry_points"]
    assert command == f"onnxgrad = {PROJECT['scripts']['onnxgrad']}"


# -- the paper --------------------------------------------------------------------------------


def test_works_that_the_paper_cites_are_in_its_list():
    works = re.findall(r"(?m)^@\w+\{(.*),$", (ROOT / "paper.bib").read_text())
    assert len(works) == len(set(works)) > 10
    assert set(re.findall(r"@(\w+)", PAPER.split("---\n", 2)[2])) == set(works)


# -- the page for Hugging Face ----------------------------------------------------------------


@pytest.fixture(scope="module")
def app():
    """The module of the Space; it imports gradio only where it builds its page."""
    path = ROOT / "spaces" / "gradio" / "app.py"
    spec = importlib.util.spec_from_file_location("space_app", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_space_describes_a_model(app):
    text, tensors, layers, checked = app.describe_upload(str(ROOT / "data" / "digits_cnn.onnx"))
    assert "6 of 6" in text
    assert tensors[0][:4] == ["0.weight", "[16, 1, 3, 3]", "float32", "yes"]
    assert ["node_linear", "Gemm", "[1, 10]", "5,130", "5,130"] in layers
    assert [row[0] for row in checked] == ["(outputs)", "image", *(row[0] for row in tensors)]
    columns = app.TENSOR_COLUMNS, app.LAYER_COLUMNS, app.CHECK_COLUMNS
    for table, headers in zip((tensors, layers, checked), columns, strict=True):
        assert {len(row) for row in table} == {len(headers)}


def test_space_shows_errors_as_text(app, tmp_path, monkeypatch):
    path = tmp_path / "broken.onnx"
    path.write_bytes(b"no model")
    text, *tables = app.describe_upload(str(path))
    assert "ModelError" in text
    assert "'broken.onnx'" in text
    assert str(tmp_path) not in text  # what folders the machine has is nobody's business
    assert tables == [[], [], []]
    monkeypatch.setattr(app, "MAX_SECONDS", 0.01)
    assert "0.01 s" in app.describe_upload(str(path))[0]
    monkeypatch.setattr(app, "MAX_BYTES", 5)
    assert "MB" in app.describe_upload(str(path))[0]
    assert app.describe_upload(None)[1:] == ([], [], [])


def test_space_names_its_files():
    folder = ROOT / "spaces" / "gradio"
    front = yaml.safe_load((folder / "README.md").read_text().split("---\n")[1])
    assert front["sdk"] == "gradio"
    assert front["license"] == PROJECT["license"].lower()
    assert (folder / front["app_file"]).exists()
    lines = (folder / "requirements.txt").read_text().split()
    assert [Requirement(line).name for line in lines] == ["onnxgrad"]
