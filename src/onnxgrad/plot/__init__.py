"""Pictures, tables, texts and reports of models and trainings.

A picture is the scene of a model (`scene.py`), whose items get rows (`layering.py`) and coordinates
(`placement.py`); `svg.py`, `figure.py` and `html.py` draw these. `text.py` prints a model, also in
the DOT language for Graphviz, and `layer_table.py` sums up its layers.
"""

from onnxgrad.lazy_names import offer_names

__getattr__, __dir__, __all__ = offer_names(__name__, __file__)
