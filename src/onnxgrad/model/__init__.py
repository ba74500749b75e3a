"""Models as `ModelProto`: reading, validating, rewriting and writing them.

Every public function that takes a model calls `read.py`, which brings any source into a checked
proto (`validate.py`, `opsets.py`, `external.py`); `convert.py` leads to `onnx_ir` and back;
`weights.py` and `constants.py` name the tensors wherever a file stores them; `write.py` and
`files.py` write files atomically. All walks over a proto go by `traversal.py`.
"""
