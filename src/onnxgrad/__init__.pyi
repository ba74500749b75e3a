"""The public names: `__init__.py` imports the module of each when it is first used."""

from . import (
    explain as explain,
    tasks as tasks,
)
from .adapters.files import (
    load_adapter as load_adapter,
    save_adapter as save_adapter,
)
from .adapters.inputs import (
    adapter_inputs as adapter_inputs,
)
from .adapters.lora import (
    add_lora as add_lora,
)
from .adapters.merge import (
    merge_lora as merge_lora,
)
from .artifacts import (
    generate_artifacts as generate_artifacts,
    merge_artifacts as merge_artifacts,
)
from .autodiff.check.comparison import (
    GradientReport as GradientReport,
    GradientRow as GradientRow,
)
from .autodiff.check.gradients import (
    check_gradient as check_gradient,
)
from .autodiff.derivative import (
    DerivativeOptions as DerivativeOptions,
    onnx_derivative as onnx_derivative,
)
from .autodiff.family import (
    derivative_family as derivative_family,
)
from .autodiff.higher import (
    hessian as hessian,
    hvp as hvp,
    jacobian as jacobian,
    jvp as jvp,
    vjp as vjp,
)
from .autodiff.partition import (
    Partition as Partition,
    Saved as Saved,
    partition as partition,
)
from .compat.forward_backward import (
    OrtGradientForwardBackward as OrtGradientForwardBackward,
    OrtGradientForwardBackwardFunction as OrtGradientForwardBackwardFunction,
)
from .compat.function_graphs import (
    function_onnx_graph as function_onnx_graph,
    get_supported_functions as get_supported_functions,
)
from .compat.learning_losses import (
    AbsoluteLearningLoss as AbsoluteLearningLoss,
    BaseLearningLoss as BaseLearningLoss,
    ElasticLearningLoss as ElasticLearningLoss,
    FunctionLearningLoss as FunctionLearningLoss,
    NegLogLearningLoss as NegLogLearningLoss,
    SquareLearningLoss as SquareLearningLoss,
)
from .compat.learning_penalties import (
    BaseLearningPenalty as BaseLearningPenalty,
    ElasticLearningPenalty as ElasticLearningPenalty,
    NoLearningPenalty as NoLearningPenalty,
    PerWeightLearningPenalty as PerWeightLearningPenalty,
    penalty_loss_onnx as penalty_loss_onnx,
)
from .compat.learning_rates import (
    BaseLearningRate as BaseLearningRate,
    LearningRateSGD as LearningRateSGD,
    LearningRateSGDNesterov as LearningRateSGDNesterov,
)
from .compat.loader import (
    OrtDataLoader as OrtDataLoader,
)
from .compat.loss_inside import (
    OrtGradientOptimizer as OrtGradientOptimizer,
)
from .compat.loss_outside import (
    OrtGradientForwardBackwardOptimizer as OrtGradientForwardBackwardOptimizer,
)
from .data.arrow import (
    arrow_dataset as arrow_dataset,
)
from .data.audio import (
    mel_spectrogram as mel_spectrogram,
    resample as resample,
)
from .data.boxes import (
    annotated_images as annotated_images,
    letterbox as letterbox,
)
from .data.class_batches import (
    p_by_k as p_by_k,
)
from .data.image_files import (
    image_size as image_size,
    list_images as list_images,
    open_image as open_image,
)
from .data.image_transforms import (
    center_crop as center_crop,
    normalize as normalize,
    random_crop as random_crop,
    random_flip as random_flip,
    resize as resize,
)
from .data.images import (
    image_folder as image_folder,
)
from .data.masks import (
    masked_images as masked_images,
)
from .data.padding import (
    by_length as by_length,
    pad_sequences as pad_sequences,
)
from .data.readers import (
    IndexedReader as IndexedReader,
    Reader as Reader,
)
from .data.sounds import (
    list_sounds as list_sounds,
    read_wave as read_wave,
    sound_folder as sound_folder,
)
from .data.tables import (
    FileTable as FileTable,
    read_table as read_table,
)
from .errors import (
    ConvergenceError as ConvergenceError,
    ConvergenceWarning as ConvergenceWarning,
    EvaluationError as EvaluationError,
    ModelError as ModelError,
    NoGradientRule as NoGradientRule,
    ProcessLostError as ProcessLostError,
    ProviderError as ProviderError,
)
from .estimator import (
    NotFittedError as NotFittedError,
)
from .finetune.add_head import (
    add_head as add_head,
)
from .finetune.attach import (
    attach as attach,
)
from .finetune.features import (
    features as features,
)
from .finetune.heads import (
    replace_head as replace_head,
)
from .finetune.preprocess import (
    preprocess as preprocess,
)
from .finetune.unroll import (
    unroll as unroll,
)
from .graph.emit import (
    Emit as Emit,
)
from .language.ctc_decoding import (
    ctc_decode as ctc_decode,
)
from .language.encoder_decoder import (
    greedy_decode as greedy_decode,
    join_encoder_decoder as join_encoder_decoder,
    shift_right as shift_right,
)
from .language.encoder_decoder_files import (
    split_encoder_decoder as split_encoder_decoder,
)
from .language.folders import (
    ModelFolder as ModelFolder,
    load_folder as load_folder,
)
from .language.generation import (
    generate as generate,
)
from .language.labeled_texts import (
    labeled_texts as labeled_texts,
)
from .language.log_probs import (
    sequence_log_probs as sequence_log_probs,
)
from .language.paired_texts import (
    paired_texts as paired_texts,
)
from .language.save import (
    save_folder as save_folder,
)
from .language.texts import (
    texts as texts,
)
from .limits import (
    set_limits as set_limits,
)
from .losses.applied_to import (
    are_probabilities as are_probabilities,
)
from .losses.boxes import (
    box_iou as box_iou,
    distribution_focal as distribution_focal,
    varifocal as varifocal,
)
from .losses.combined import (
    combined_loss as combined_loss,
)
from .losses.distillation import (
    distillation as distillation,
)
from .losses.formulas import (
    LOSSES as LOSSES,
)
from .losses.in_graph import (
    add_loss_output as add_loss_output,
)
from .losses.info import (
    LossInfo as LossInfo,
)
from .losses.other_models import (
    LossModel as LossModel,
)
from .losses.output_losses import (
    OutputLoss as OutputLoss,
)
from .losses.row_losses import (
    unreduced_onnx_loss as unreduced_onnx_loss,
)
from .losses.spec import (
    LabelKind as LabelKind,
    LossSpec as LossSpec,
)
from .metrics.average_precision import (
    MeanAveragePrecision as MeanAveragePrecision,
)
from .metrics.base import (
    Metric as Metric,
    PredictionInfo as PredictionInfo,
)
from .metrics.entities import (
    EntityF1 as EntityF1,
)
from .metrics.false_alarms import (
    AlarmCurve as AlarmCurve,
    FalseAlarms as FalseAlarms,
    false_alarms as false_alarms,
)
from .metrics.texts import (
    TextErrorRate as TextErrorRate,
)
from .model.feeds import (
    random_feed as random_feed,
)
from .model.rename import (
    onnx_rename_names as onnx_rename_names,
    onnx_rename_weights as onnx_rename_weights,
)
from .model.surgery import (
    add_initializer as add_initializer,
    get_onnx_opset as get_onnx_opset,
    get_train_initializer as get_train_initializer,
    replace_initializers_into_onnx as replace_initializers_into_onnx,
    select_model_inputs_outputs as select_model_inputs_outputs,
)
from .model.write import (
    save as save,
)
from .operators.registry import (
    Unsupported as Unsupported,
)
from .operators.user_rules import (
    lowering as lowering,
    rule as rule,
)
from .optimizers.adaptive import (
    ScaleByAdam as ScaleByAdam,
)
from .optimizers.averages import (
    ema as ema,
    lookahead as lookahead,
    schedule_free as schedule_free,
    swa as swa,
)
from .optimizers.base import (
    Chain as Chain,
    Inputs as Inputs,
    Optimizer as Optimizer,
)
from .optimizers.clipping import (
    clip as clip,
    clip_by_global_norm as clip_by_global_norm,
    clip_by_norm as clip_by_norm,
)
from .optimizers.groups import (
    ParamGroup as ParamGroup,
    param_groups as param_groups,
)
from .optimizers.presets import (
    adadelta as adadelta,
    adafactor as adafactor,
    adagrad as adagrad,
    adam as adam,
    adamax as adamax,
    adamw as adamw,
    lamb as lamb,
    lion as lion,
    momentum as momentum,
    muon as muon,
    nadam as nadam,
    nesterov as nesterov,
    radam as radam,
    rmsprop as rmsprop,
    rprop as rprop,
    sgd as sgd,
)
from .optimizers.scaling import (
    AddDecayedWeights as AddDecayedWeights,
    ScaleByLearningRate as ScaleByLearningRate,
    Trace as Trace,
)
from .optimizers.unfreezing import (
    gradual_unfreezing as gradual_unfreezing,
)
from .parallel.process_groups import (
    DataParallel as DataParallel,
)
from .plot.dot import (
    to_dot as to_dot,
)
from .plot.figure import (
    plot_onnxs as plot_onnxs,
)
from .plot.html import (
    Picture as Picture,
    show as show,
    to_html as to_html,
)
from .plot.loss_curves import (
    plot_history as plot_history,
)
from .plot.summary import (
    Layer as Layer,
    Summary as Summary,
    summary as summary,
)
from .plot.svg import (
    to_svg as to_svg,
)
from .plot.text import (
    onnx_simple_text_plot as onnx_simple_text_plot,
    onnx_text_plot_io as onnx_text_plot_io,
)
from .quantization.quantize import (
    quantize as quantize,
)
from .report.card import (
    write_card as write_card,
)
from .report.page import (
    write_report as write_report,
)
from .report.recorder import (
    Recorder as Recorder,
)
from .schedules.base import (
    Schedule as Schedule,
    constant as constant,
)
from .schedules.compose import (
    join as join,
    warmup as warmup,
)
from .schedules.curves import (
    cosine as cosine,
    exponential as exponential,
    inverse_sqrt as inverse_sqrt,
    linear as linear,
    one_cycle as one_cycle,
    polynomial as polynomial,
    step_decay as step_decay,
)
from .schedules.plateau import (
    plateau as plateau,
)
from .sklearn import (
    OnnxClassifier as OnnxClassifier,
    OnnxRegressor as OnnxRegressor,
)
from .training.callbacks.base import (
    Callback as Callback,
    Control as Control,
)
from .training.callbacks.checkpoint import (
    Checkpoint as Checkpoint,
)
from .training.callbacks.diagnostics import (
    NanWatch as NanWatch,
    Norms as Norms,
    Timing as Timing,
)
from .training.callbacks.early_stopping import (
    EarlyStopping as EarlyStopping,
)
from .training.callbacks.history import (
    History as History,
)
from .training.callbacks.progress import (
    Progress as Progress,
)
from .training.callbacks.trackers import (
    MLflow as MLflow,
    OptunaPruning as OptunaPruning,
    TensorBoard as TensorBoard,
    WeightsAndBiases as WeightsAndBiases,
)
from .training.mixing import (
    cutmix as cutmix,
    mixup as mixup,
)
from .training.parameters.choice import (
    trainable as trainable,
)
from .training.parameters.equal_constants import (
    separate_merged as separate_merged,
    tie_copies as tie_copies,
)
from .training.progress import (
    FitProgress as FitProgress,
)
from .training.range_test import (
    RangeTest as RangeTest,
    lr_range_test as lr_range_test,
)
from .training.stack import (
    TrainerStack as TrainerStack,
)
from .training.state import (
    TrainState as TrainState,
)
from .training.trainer import (
    Trainer as Trainer,
)

__version__: str
__all__: list[str]
