"""Tools for graphs: writing nodes, changing inputs, outputs, weights and names."""

from onnxgrad.adapters.inputs import (
    adapter_inputs as adapter_inputs,
)
from onnxgrad.autodiff.check.comparison import (
    GradientReport as GradientReport,
    GradientRow as GradientRow,
)
from onnxgrad.autodiff.family import (
    derivative_family as derivative_family,
)
from onnxgrad.autodiff.partition import (
    Partition as Partition,
    SavedTensor as SavedTensor,
)
from onnxgrad.checks import (
    set_limits as set_limits,
)
from onnxgrad.finetune.fold_batch_norm import (
    fold_batch_norm as fold_batch_norm,
)
from onnxgrad.finetune.heads import (
    features as features,
)
from onnxgrad.finetune.preprocess import (
    preprocess as preprocess,
)
from onnxgrad.finetune.unroll import (
    unroll as unroll,
)
from onnxgrad.graph.emit import (
    Emit as Emit,
)
from onnxgrad.model.rename import (
    onnx_rename_names as onnx_rename_names,
    onnx_rename_weights as onnx_rename_weights,
)
from onnxgrad.model.surgery import (
    add_initializer as add_initializer,
    get_onnx_opset as get_onnx_opset,
    get_train_initializer as get_train_initializer,
    replace_initializers_into_onnx as replace_initializers_into_onnx,
    select_model_inputs_outputs as select_model_inputs_outputs,
)
from onnxgrad.operators.records import (
    Unsupported as Unsupported,
)
from onnxgrad.training.parameters.equal_constants import (
    separate_merged as separate_merged,
    tie_copies as tie_copies,
)
