"""What tests of language models share: a folder of onnxruntime-genai, built once for all runs."""

from __future__ import annotations

import io
import tarfile
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.support.exports import cached_bytes
from tests.support.paths import ROOT


@pytest.fixture(scope="session")
def genai_folder(tmp_path_factory) -> Path:
    """Return the folder of a small Llama of genai's builder, next to the `hf` of transformers.

    The builder takes seconds: what it wrote is kept as exports are.
    """
    for name in ("onnxruntime_genai", "transformers"):
        pytest.importorskip(name)
    home = tmp_path_factory.mktemp("genai")

    def build_archive() -> bytes:
        from language_models import build

        build(home)
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w") as archive:
            for name in ("hf", "fp32"):
                archive.add(home / name, arcname=name)
        return file.getvalue()

    source = (ROOT / "benchmarks" / "language_models.py").read_text()
    archive = cached_bytes((source, version("onnxruntime-genai")), build_archive)
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(home, filter="data")
    return home / "fp32"
