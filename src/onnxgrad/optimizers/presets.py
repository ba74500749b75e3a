"""Functions that return optimizers by name; the learning rate is an argument of training.

`weight_decay` and `exclude` mean the same in all of them. `exclude` are patterns of `fnmatch`,
case-sensitive, of the names of weights that do not decay; training raises ValueError for a pattern
that matches no weight. For weights of float16, give an `eps` of 1e-4 or so: one below 6e-8 is zero
there, and gradients of zero then give NaN, as in PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from onnxgrad.checks import check_count
from onnxgrad.errors import unknown
from onnxgrad.optimizers import adaptive
from onnxgrad.optimizers.averages import schedule_free
from onnxgrad.optimizers.base import Chain, Optimizer
from onnxgrad.optimizers.groups import ByRank, ParamGroup, param_groups
from onnxgrad.optimizers.matrix_updates import Adafactor, Orthogonalize, ScaleByTrustRatio
from onnxgrad.optimizers.scaling import AddDecayedWeights, ScaleByLearningRate, Trace

Patterns = Iterable[str]


def sgd(
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    exclude: Patterns = (),
) -> Optimizer:
    """w <- w - lr g;  with momentum as `momentum` and `nesterov`, as `torch.optim.SGD`.

    Examples:
        >>> import onnxgrad as og
        >>> og.optimizers.sgd()
        ScaleByLearningRate()
    """
    if nesterov and not momentum:
        raise ValueError("nesterov=True needs a momentum above 0")
    trace = (Trace(momentum, nesterov),) if momentum else ()
    return _chain_with_l2_penalty(weight_decay, exclude, *trace)


def momentum(decay: float = 0.9, weight_decay: float = 0.0, exclude: Patterns = ()) -> Optimizer:
    """v <- m v + g;  w <- w - lr v, as `torch.optim.SGD(momentum=m)`.

    Examples:
        >>> import onnxgrad as og
        >>> og.optimizers.momentum(0.8).slots
        ('velocity',)
    """
    return _chain_with_l2_penalty(weight_decay, exclude, Trace(decay))


def nesterov(decay: float = 0.9, weight_decay: float = 0.0, exclude: Patterns = ()) -> Optimizer:
    """v <- m v + g;  w <- w - lr (m v + g), as `torch.optim.SGD(momentum=m, nesterov=True)`.

    Examples:
        >>> import onnxgrad as og
        >>> og.optimizers.nesterov(0.8)
        Chain(parts=(Trace(decay=0.8, nesterov=True), ScaleByLearningRate()))
    """
    return _chain_with_l2_penalty(weight_decay, exclude, Trace(decay, nesterov=True))


def adam(
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    exclude: Patterns = (),
    amsgrad: bool = False,
) -> Optimizer:
    """Adam, as `torch.optim.Adam`; for the formula, see `ScaleByAdam`.

    Examples:
        >>> import onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,2] x) => (float[N,2] y) <float[2] w = {2.0, 3.0}> { y = Mul(x, w) }''')
        >>> loss = og.add_loss_output(model)
        >>> trainer = og.compat.OrtGradientOptimizer(
        ...     loss, ["w"], training_optimizer_name=og.optimizers.adam(b1=0.8), learning_rate=1.0,
        ...     max_iter=1, batch_size=2)
        >>> trainer = trainer.fit([[1, 1], [1, 1]], [[0, 9], [0, 9]])
        >>> print(trainer.trained_coef_["w"].round(3))  # the first step of Adam is lr sign(g)
        [1. 4.]
    """
    return _chain_with_l2_penalty(weight_decay, exclude, adaptive.ScaleByAdam(b1, b2, eps, amsgrad))


def adamw(
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    exclude: Patterns = (),
    amsgrad: bool = False,
) -> Optimizer:
    """Adam with decoupled weight decay, as `torch.optim.AdamW`.

    Examples:
        >>> import onnxgrad as og
        >>> optimizer = og.optimizers.adamw(weight_decay=0.1, exclude=("*bias", "*norm*"))
        >>> optimizer.parts[1].decay, optimizer.slots
        (0.1, ('m', 'v'))
    """
    return _chain_with_weight_decay(
        weight_decay, exclude, adaptive.ScaleByAdam(b1, b2, eps, amsgrad)
    )


def adamax(
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    exclude: Patterns = (),
) -> Optimizer:
    """Adam with the maximum norm, as `torch.optim.Adamax`; for the formula, see `ScaleByAdamax`.

    Examples:
        >>> from onnxgrad.optimizers import adamax
        >>> adamax().slots
        ('m', 'norm')
    """
    return _chain_with_l2_penalty(weight_decay, exclude, adaptive.ScaleByAdamax(b1, b2, eps))


def nadam(
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum_decay: float = 4e-3,
    exclude: Patterns = (),
) -> Optimizer:
    """Adam with Nesterov momentum, as `torch.optim.NAdam`; for the formula, see `ScaleByNadam`.

    Examples:
        >>> from onnxgrad.optimizers import nadam
        >>> nadam().slots
        ('m', 'v', 'mu_product')
    """
    nadam = adaptive.ScaleByNadam(b1, b2, eps, momentum_decay)
    return _chain_with_l2_penalty(weight_decay, exclude, nadam)


def radam(
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    exclude: Patterns = (),
) -> Optimizer:
    """Rectified Adam, as `torch.optim.RAdam`; for the formula, see `ScaleByRadam`.

    Examples:
        >>> from onnxgrad.optimizers import radam
        >>> radam().slots
        ('m', 'v')
    """
    return _chain_with_l2_penalty(weight_decay, exclude, adaptive.ScaleByRadam(b1, b2, eps))


def adagrad(
    lr_decay: float = 0.0,
    weight_decay: float = 0.0,
    initial_accumulator_value: float = 0.0,
    eps: float = 1e-10,
    exclude: Patterns = (),
) -> Optimizer:
    """s <- s + g^2;  w <- w - lr / (1 + (t - 1) lr_decay) g / (sqrt(s) + eps), as
    `torch.optim.Adagrad`.

    Examples:
        >>> from onnxgrad.optimizers import adagrad
        >>> adagrad().slots
        ('sum',)
    """
    scale = adaptive.ScaleByAdagrad(lr_decay, initial_accumulator_value, eps)
    return _chain_with_l2_penalty(weight_decay, exclude, scale)


def adadelta(
    rho: float = 0.9, eps: float = 1e-6, weight_decay: float = 0.0, exclude: Patterns = ()
) -> Optimizer:
    """As `torch.optim.Adadelta`, whose learning rate is 1; for the formula, see `ScaleByAdadelta`.

    Examples:
        >>> from onnxgrad.optimizers import adadelta
        >>> adadelta().slots
        ('v', 'steps')
    """
    return _chain_with_l2_penalty(weight_decay, exclude, adaptive.ScaleByAdadelta(rho, eps))


def rmsprop(
    alpha: float = 0.99,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    centered: bool = False,
    exclude: Patterns = (),
) -> Optimizer:
    """v <- a v + (1 - a) g^2;  w <- w - lr g / (sqrt(v) + eps), as `torch.optim.RMSprop`.

    Examples:
        >>> from onnxgrad.optimizers import rmsprop
        >>> rmsprop(momentum=0.9, centered=True).slots
        ('v', 'm', 'velocity')
    """
    trace = (Trace(momentum),) if momentum else ()
    return _chain_with_l2_penalty(
        weight_decay, exclude, adaptive.ScaleByRms(alpha, eps, centered), *trace
    )


def rprop(
    etas: tuple[float, float] = (0.5, 1.2), step_sizes: tuple[float, float] = (1e-6, 50.0)
) -> Optimizer:
    """Steps by the signs of gradients, as `torch.optim.Rprop`; for the formula, see `Rprop`.

    The learning rate is the first step size of each element; later values of a schedule have no
    effect. It is meant for gradients of all rows, not of batches.

    Examples:
        >>> from onnxgrad.optimizers import rprop
        >>> rprop().slots
        ('last', 'size')
    """
    return adaptive.Rprop(etas, step_sizes)


def lion(
    b1: float = 0.9, b2: float = 0.99, weight_decay: float = 1e-3, exclude: Patterns = ()
) -> Optimizer:
    """w <- w - lr (sign(b1 m + (1 - b1) g) + weight_decay w);  m <- b2 m + (1 - b2) g, as
    `optax.lion`.  Its learning rate is 3 to 10 times smaller than the rate of AdamW.

    Examples:
        >>> from onnxgrad.optimizers import lion
        >>> lion().slots
        ('m',)
    """
    return _chain_with_weight_decay(weight_decay, exclude, adaptive.ScaleByLion(b1, b2))


def lamb(
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    exclude: Patterns = (),
) -> Optimizer:
    """AdamW whose step has the norm lr |w| for every weight, as `optax.lamb`.
    You et al. 2020, arXiv:1904.00962.

    Examples:
        >>> from onnxgrad.optimizers import lamb
        >>> lamb().elementwise
        False
    """
    adam, decay = adaptive.ScaleByAdam(b1, b2, eps), _weight_decay_transform(weight_decay, exclude)
    return Chain((adam, decay, ScaleByTrustRatio(), ScaleByLearningRate()))


def adafactor(
    beta2_decay: float = -0.8,
    eps: tuple[float | None, float] = (None, 1e-3),
    d: float = 1.0,
    weight_decay: float = 0.0,
    exclude: Patterns = (),
) -> Optimizer:
    """Scaling by a product of means of rows and columns, as `torch.optim.Adafactor` (without
    momentum); for the formula, see `Adafactor`.  Shazeer & Stern 2018, arXiv:1804.04235.

    The step is relative to the size of a weight: PyTorch's learning rate is 0.01, limited by
    1 / sqrt(t). The first number of `eps`, if None, is the eps of the weight's dtype.

    Examples:
        >>> from onnxgrad.optimizers import adafactor
        >>> adafactor().for_weight("w", (100, 50)).slot_shape("row", (100, 50))
        (100, 1)
    """
    return Adafactor(beta2_decay, eps, d, weight_decay, exclude)


def muon(
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
    eps: float = 1e-7,
    ns_steps: int = 5,
    adjust_lr_fn: str | None = None,
    other: Optimizer | ParamGroup | None = None,
    exclude: Patterns = (),
) -> Optimizer:
    """Orthogonalized momentum for matrices, as `torch.optim.Muon`; see `Orthogonalize`.

    Args:
        weight_decay: decoupled decay of the matrices.
        momentum: see `Orthogonalize`.
        nesterov: see `Orthogonalize`.
        ns_coefficients: see `Orthogonalize`.
        eps: see `Orthogonalize`.
        ns_steps: see `Orthogonalize`.
        adjust_lr_fn: "original" (None) or "match_rms_adamw", with which `other` can have the same
            learning rate.
        other: the optimizer of all weights that do not have two axes, so of biases, norms, and the
            weights of convolutions; `ParamGroup(adamw(), rate=0.1)` gives it another learning rate.
            None is `adamw()`.
        exclude: patterns of the names of matrices for `other`: embeddings, and the last layer.

    Examples:
        >>> from onnxgrad.optimizers import muon
        >>> optimizer = muon(exclude=("embedding*", "head*"))
        >>> for name in ("layer.weight", "head.weight"):
        ...     print(optimizer.for_weight(name, (10, 64)).slots)
        ('momentum',)
        ('m', 'v')
    """
    matrices = Orthogonalize(momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn)
    others = other.resolved(adamw()) if isinstance(other, ParamGroup) else other or adamw()
    return ByRank(_chain_with_weight_decay(weight_decay, (), matrices), others, exclude)


OPTIMIZERS: dict[str, Callable[[], Optimizer]] = {
    function.__name__: function
    for function in (
        *(sgd, momentum, nesterov, adam, adamw, adamax, nadam, radam, adagrad, adadelta, rmsprop),
        *(rprop, lion, schedule_free),
    )
}
# optimizers that are not elementwise, so that each weight is updated by itself
WHOLE_TENSORS: dict[str, Callable[[], Optimizer]] = {
    function.__name__: function for function in (lamb, adafactor, muon)
}


def select(choice: str | Optimizer) -> Optimizer:
    """Return the optimizer for a name or an instance; `SGDOptimizer` is `sgd`, and so on.

    Raises:
        ValueError: an unknown name.
    """
    if isinstance(choice, Optimizer):
        return choice
    name = str(choice).removesuffix("Optimizer").lower()
    names = OPTIMIZERS | WHOLE_TENSORS
    if name not in names:
        raise unknown("optimizer", choice, names)
    return names[name]()


def gradual_unfreezing(
    patterns: Iterable[str],
    every: int,
    optimizer: str | Optimizer = "adamw",
    rate: float = 1.0,
) -> Optimizer:
    """Train the weights of the first pattern; every `every` steps, the next pattern joins them.

    Howard & Ruder 2018, arXiv:1801.06146, section 3.3, where a group joins after each epoch, and
    lower layers have smaller rates. See `start` of `ParamGroup`.

    Args:
        patterns: patterns of `fnmatch`, from the layers that train first, such as the head, to the
            layers that train last; "*" at the end matches all other weights.
        every: number of steps from one group to the next.
        optimizer: the optimizer of all groups, by name or as an object.
        rate: factor of the learning rate from each group to the next; 1 / 2.6 in the paper.

    Raises:
        ValueError: as `param_groups`; no pattern; or an `every` that is no integer of 1 or more.

    Examples:
        >>> import onnxgrad as og
        >>> optimizer = og.optimizers.gradual_unfreezing(["head.*", "layer4.*", "*"], every=100)
        >>> optimizer.for_weight("layer4.conv.weight", (8, 8, 3, 3)).start
        100
    """
    if isinstance(patterns, str):  # its letters would be the patterns
        raise ValueError(f"patterns must be a list: write [{patterns!r}]")
    check_count("every", every)
    chosen = list(patterns)
    if not chosen or len(set(chosen)) < len(chosen):
        raise ValueError(f"patterns must be one or more different patterns, not {chosen}")
    shared = select(optimizer)
    return param_groups(
        {p: ParamGroup(shared, rate**i, start=i * every) for i, p in enumerate(chosen)}
    )


def _chain_with_l2_penalty(decay: float, exclude: Patterns, *parts: Optimizer) -> Optimizer:
    """Return the chain of an L2 penalty (unless `decay` is 0), `parts`, and the learning rate."""
    penalty = _weight_decay_transform(decay, exclude)
    chain = (*((penalty,) if decay else ()), *parts, ScaleByLearningRate())
    return Chain(chain) if len(chain) > 1 else chain[0]


def _chain_with_weight_decay(decay: float, exclude: Patterns, *parts: Optimizer) -> Optimizer:
    """Return the chain of `parts`, decoupled weight decay, and the learning rate."""
    return Chain((*parts, _weight_decay_transform(decay, exclude), ScaleByLearningRate()))


def _weight_decay_transform(decay: float, exclude: Patterns) -> Optimizer:
    """Return the transform that adds `decay` times the weight, except for excluded names."""
    if exclude and not decay:
        raise ValueError("exclude= names weights that do not decay: give a weight_decay, too")
    return AddDecayedWeights(decay, exclude)
