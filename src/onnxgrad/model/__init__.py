"""Models as `ModelProto`: reading, validating, rewriting and writing them.

Every public function that takes a model calls `read.py`, which returns a checked proto for any
source (`validate.py`, `opsets.py`, `external.py`); `convert.py` converts to `onnx_ir` and back;
`weights.py` and `constants.py` name the constant tensors wherever a file stores them;
`local_functions.py` inlines functions; `write.py` and `files.py` write files atomically.
`traversal.py` has all walks over a proto, and `node_inserter.py` inserts nodes into it.
"""
