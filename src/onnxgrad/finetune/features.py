"""`features`: the part of a model in front of its last layer."""

from __future__ import annotations

from onnx import ModelProto

from onnxgrad.autodiff.primal.local_functions import inlined
from onnxgrad.finetune.heads import find_layer
from onnxgrad.finetune.label_outputs import without_zipmaps
from onnxgrad.graph.infer import infer
from onnxgrad.model.convert import to_ir
from onnxgrad.model.read import ModelLike, read
from onnxgrad.model.surgery import drop_unused_inputs, select_model_inputs_outputs


def features(model: ModelLike, at: str | None = None, *, output: str | None = None) -> ModelProto:
    """Return the part of `model` that computes what its last layer reads.

    Its only output is that value, under the name that it has in `model`. Inputs that are not
    needed for it are removed.

    Args:
        model: model, serialized model or path; never modified.
        at: where to cut: behind the value of this name; or before a layer, named by its node or its
            weights, which may be a pattern. None: before the layer that `replace_head` replaces.
        output: the output whose last layer is meant, in a model where outputs have several.

    Raises:
        ValueError: there is no such value or layer, or several.
        ModelError: `model` cannot be read.

    Examples:
        >>> import onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,2] x) => (float[N,3] p) <float[3,2] w = {1, 2, 3, 4, 5, 6}> {
        ...     a = Relu(x)  h = Gemm <transB = 1> (a, w)  p = Softmax(h) }''')
        >>> part = og.graph.features(model)
        >>> [node.op_type for node in part.graph.node], part.graph.output[0].name
        (['Relu'], 'a')
    """
    proto = read(model)
    value = at or ""
    if not at or all(at not in node.output for node in proto.graph.node):
        proto, _ = without_zipmaps(inlined(proto) if proto.functions else proto)
        changed = to_ir(proto)
        infer(changed)
        value = str(find_layer(changed.graph, proto, at, output).x.name)
    part = select_model_inputs_outputs(proto, outputs=[value])
    drop_unused_inputs(part)
    return part
