"""The public names of `onnxcustom.training` and `experimental_experiment.gradient`.

Both estimators (`loss_inside.py`, `loss_outside.py`, with their base in `seed_trainer.py`) are
faces of the `Job` of `onnxgrad.training`. Losses and penalties outside of a model are objects
(`learning_losses.py`, `learning_penalties.py`); `function_graphs.py` has them as small models.
"""

from onnxgrad.lazy_names import offer_names

__getattr__, __dir__, __all__ = offer_names(__name__, __file__)
