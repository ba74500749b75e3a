"""Losses, and L1 and L2 penalties of weights; importing this package registers the losses.

A `spec.LossSpec` is a loss by name: its formula, its labels and its options. The formulas are in
`formulas`, `classification`, `image_losses`, `embeddings` and `ctc`.

A trainer gets the losses of all outputs from `objectives.training_loss`. Each loss is written in
four steps:

1. `output_terms.formula_terms` looks for the scores behind the prediction (`logits`).
2. `applied_to` decides the options that the user has not set: the axis of the classes
   (`class_axis`), and whether the prediction holds scores or probabilities (`value_range`).
3. `in_graph.make_label_input` makes the label, and `LossSpec.terms` writes a loss for each label.
4. `sums` adds the losses up; over a large vocabulary, `vocabulary` does so without all logits in
   memory, by the layers in `head`, the labels in `positions`, or the blocks in `word_blocks`.

`in_graph.add_loss_output` writes a loss into a model without a trainer, and `row_losses` removes
its reduction. Other losses are models (`other_models`, by `second_model`), distances of features of
a model (`perceptual`), or functions of outputs without labels (`output_losses`); `combined` is a
sum of losses.
"""

from onnxgrad.lazy_names import offer_names
from onnxgrad.losses import formulas

# isort: split
from onnxgrad.losses import ctc, embeddings, image_losses

__getattr__, __dir__, __all__ = offer_names(__name__, __file__)
