"""The public names of `onnxcustom.training` and `experimental_experiment.gradient`.

Both estimators (`gradient_optimizers.py`, with their base class in `seed_trainer.py`) train by the
`Job` of `onnxgrad.training`. Losses and penalties outside of a model are objects
(`learning_losses.py`, `learning_penalties.py`); `function_graphs.py` has them as small models.
"""

from onnxgrad.lazy_names import offer_names

__getattr__, __dir__, __all__ = offer_names(__name__, __file__)
