"""Artifacts: files with which any onnxruntime trains a model, also without Python.

`generate.py` writes the models (`models.py`) into a folder that is there completely or not at all,
with a manifest of its files (`folder.py`); `merge.py` puts a checkpoint into the model.
"""

from onnxgrad.lazy_names import offer_names

__getattr__, __dir__, __all__ = offer_names(__name__, __file__)
