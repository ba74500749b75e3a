"""The shell lines of all pages run in their order, between the Python cells of the page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from published import UnavailableError, fetched_tokenizer, unpack_here

from tests.support.pages import DOCS, blocks_of, require_imports
from tests.support.paths import ROOT
from tests.support.running import in_sweep, webgpu_on_cpu

# What pages download; a helper lays it there. What pages install is there, or the test is skipped.
DONE_BEFORE = re.compile(r"^(?:pip (?:install|download)|python -m zipfile -e)\b")
UNPACKED = re.compile(r"^unpack_here\(\"(.*)\"\)$", re.MULTILINE)
PAGES = sorted(
    path.relative_to(DOCS).as_posix()
    for path in DOCS.rglob("*.md")
    if not path.relative_to(DOCS).as_posix().startswith("auto_")
    and any(block.kind == "bash" for block in blocks_of(path.relative_to(DOCS).as_posix()))
)
# Pages that run as their readers see them: nothing but published models lies there before.
ALONE = {"index.md", *(f"hold/{path.name}" for path in (DOCS / "hold").glob("*.md"))}
ALONE -= {"hold/index.md", "hold/language_model.md"}
# Blocks that no test can run, by page. The comment above each block says why.
NOT_RUN = {
    "benchmarks.md": 1,  # hours
    "clients.md": 2,  # npm
    "hold/index.md": 1,  # names that stand for the reader's files
    "hold/language_model.md": 1,  # a download from the Hugging Face Hub
    "index.md": 1,  # names that stand for the reader's files
    "parallel.md": 1,  # two machines, MPI
    "phones.md": 2,  # headers of onnxruntime, a .NET SDK
}
IMPORTED = {  # by extras that pages install, and by the hidden cells of pages
    "detection": ["PIL", "pycocotools"],
    "entities": ["tokenizers", "seqeval"],
    "images": ["PIL"],
    "jax": ["jax"],
    "ocr": ["PIL", "rapidfuzz"],
    "pymc": ["pymc"],
    "sklearn": ["skl2onnx"],
    "text": ["tokenizers"],
    "torch": ["torch"],
    "cli/predict.md": ["tokenizers"],
    "parallel.md": ["torch"],
    "report.md": ["PIL", "IPython"],  # the page links to a report in a notebook
    "solvers.md": ["casadi"],
}
QUICK = "hold/index.md"

SHELL = """
import subprocess as _subprocess


def _shell(lines):
    bash = ["bash", "-euo", "pipefail", "-c"]
    done = _subprocess.run([*bash, lines], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{lines}\\n{done.stdout[-2000:]}\\n{done.stderr[-4000:]}")
    print(done.stdout)


"""


def shell_lines(code: str) -> str:
    """Return the lines of a block that a reader runs once all is installed and downloaded."""
    lines = code.replace("\\\n", " ").splitlines()
    return "\n".join(line for line in lines if line and not DONE_BEFORE.match(line))


def script_of(page: str) -> str:
    """Return a Python program that runs the cells and the shell lines of a page in their order."""
    parts = [SHELL]
    for block in blocks_of(page):
        if block.not_run or (block.hidden and page in ALONE):
            continue
        if block.kind == "python":
            parts.append(block.code)
        elif lines := shell_lines(block.code):
            parts.append(f"_shell({lines!r})\n")
    return "".join(parts)


def lay_published_files(page: str) -> None:
    """Lay the published models and the tokenizer of a page where the page unpacks them."""
    text = (DOCS / page).read_text()
    try:
        for name in UNPACKED.findall(text):
            unpack_here(name)
        if "fetched_tokenizer()" in text:
            Path("published/tokenizer").mkdir()
            Path("published/tokenizer/tokenizer.json").symlink_to(fetched_tokenizer())
    except UnavailableError as e:
        pytest.skip(str(e))


def test_blocks_that_are_not_run():
    """Whoever marks a block counts it here, so that the marks do not grow unseen."""
    marked = {page: sum(bool(block.not_run) for block in blocks_of(page)) for page in PAGES}
    assert {page: count for page, count in marked.items() if count} == NOT_RUN


def test_marks_are_above_blocks():
    for page in PAGES:
        marks = re.findall(r"^% not run:", (DOCS / page).read_text(), re.MULTILINE)
        assert len(marks) == sum(bool(block.not_run) for block in blocks_of(page)), page


@pytest.mark.parametrize("page", [page if page == QUICK else in_sweep(page) for page in PAGES])
def test_page(page, tmp_path, monkeypatch):
    """A page runs from its first line to its last in an empty folder, Python and shell."""
    script = script_of(page)
    require_imports(script)
    for need in [page, *re.findall(r"pip install '\.\[(\w+)\]'", (DOCS / page).read_text())]:
        for module in IMPORTED.get(need, []):
            pytest.importorskip(module)
    monkeypatch.chdir(tmp_path)
    if page in ALONE:
        lay_published_files(page)
    environment = {**os.environ, "MPLBACKEND": "agg"}
    read = (ROOT / "src", DOCS / "_ext", ROOT / "benchmarks")
    environment["PYTHONPATH"] = os.pathsep.join(map(str, read))
    if "--device webgpu" in script:
        environment |= webgpu_on_cpu()
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
