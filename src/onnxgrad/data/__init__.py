"""User data: readers, tables, transforms, and checks against the declared inputs of a model.

Whatever a user passes becomes arrays of numbers in the shape of an input: `field.py` checks it,
`arrays.py` converts it, `columns.py` and `class_numbers.py` know the names of columns and classes.
Files that are read as a whole are in `tables.py` and `cells.py`. Data that are read while training
runs have a `Reader` (`readers.py`): `arrow.py`, `images.py`, `boxes.py`, `masks.py`, `sounds.py`,
`padding.py`, `torch_data.py`; `prefetch.py` reads ahead.
"""

from onnxgrad.lazy_names import offer_names

__getattr__, __dir__, __all__ = offer_names(__name__, __file__)
