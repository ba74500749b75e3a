"""New heads, backbones and preprocessing for models that are fine-tuned.

`heads.py` replaces a last layer: `locate.py` finds it, `new_weights.py` draws its weights, and
`follow.py` corrects the nodes behind it. `add_head.py` puts a layer on features, `attach.py` joins
two models, `unroll.py` repeats a step in time, and `preprocess.py` writes transforms into the file.
`insert_layers.py` inserts BatchNormalization and Dropout, and `fold_batch_norm.py` makes
BatchNormalization part of the layers in front again.
"""
