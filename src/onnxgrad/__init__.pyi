"""The public names of the root: `lazy_names` imports the module of each when it is first used."""

from onnxgrad import (
    artifacts as artifacts,
    callbacks as callbacks,
    compat as compat,
    data as data,
    explain as explain,
    graph as graph,
    language as language,
    losses as losses,
    metrics as metrics,
    optimizers as optimizers,
    parallel as parallel,
    plot as plot,
    schedules as schedules,
    tasks as tasks,
)
from onnxgrad.adapters.files import (
    load_adapter as load_adapter,
    save_adapter as save_adapter,
)
from onnxgrad.adapters.lora import (
    add_lora as add_lora,
)
from onnxgrad.adapters.merge import (
    merge_lora as merge_lora,
)
from onnxgrad.autodiff.check.gradients import (
    check_gradient as check_gradient,
)
from onnxgrad.autodiff.derivative import (
    DerivativeOptions as DerivativeOptions,
    onnx_derivative as onnx_derivative,
)
from onnxgrad.autodiff.higher import (
    hessian as hessian,
    hvp as hvp,
    jacobian as jacobian,
    jvp as jvp,
    vjp as vjp,
)
from onnxgrad.autodiff.partition import (
    partition as partition,
)
from onnxgrad.errors import (
    ConvergenceError as ConvergenceError,
    ConvergenceWarning as ConvergenceWarning,
    ModelError as ModelError,
    NoGradientRule as NoGradientRule,
    ProviderError as ProviderError,
)
from onnxgrad.estimator import (
    NotFittedError as NotFittedError,
)
from onnxgrad.finetune.add_head import (
    add_head as add_head,
)
from onnxgrad.finetune.attach import (
    attach as attach,
)
from onnxgrad.finetune.heads import (
    replace_head as replace_head,
)
from onnxgrad.finetune.insert_layers import (
    insert_batch_norm as insert_batch_norm,
    insert_dropout as insert_dropout,
)
from onnxgrad.language.folders import (
    load_folder as load_folder,
)
from onnxgrad.language.save import (
    save_folder as save_folder,
)
from onnxgrad.losses.in_graph import (
    add_loss_output as add_loss_output,
)
from onnxgrad.model.feeds import (
    random_feed as random_feed,
)
from onnxgrad.model.write import (
    save as save,
)
from onnxgrad.operators.user_rules import (
    lowering as lowering,
    rule as rule,
)
from onnxgrad.plot.html import (
    to_html as to_html,
)
from onnxgrad.plot.layer_table import (
    summary as summary,
)
from onnxgrad.plot.svg import (
    to_svg as to_svg,
)
from onnxgrad.quantization.quantize import (
    quantize as quantize,
)
from onnxgrad.sklearn import (
    OnnxClassifier as OnnxClassifier,
    OnnxRegressor as OnnxRegressor,
)
from onnxgrad.training.callbacks.checkpoint import (
    Checkpoint as Checkpoint,
)
from onnxgrad.training.callbacks.early_stopping import (
    EarlyStopping as EarlyStopping,
)
from onnxgrad.training.callbacks.progress import (
    Progress as Progress,
)
from onnxgrad.training.parameters.choice import (
    trainable as trainable,
)
from onnxgrad.training.samples import (
    predict_samples as predict_samples,
)
from onnxgrad.training.stack import (
    TrainerStack as TrainerStack,
)
from onnxgrad.training.trainer import (
    Trainer as Trainer,
)

__version__: str
__all__: list[str]
