"""Programs for `onnxcustom` and `experimental_experiment.gradient`: arguments, defaults, calls."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from onnxgrad.compat import (
    AbsoluteLearningLoss,
    BaseLearningLoss,
    BaseLearningPenalty,
    BaseLearningRate,
    DerivativeOptions,
    ElasticLearningLoss,
    ElasticLearningPenalty,
    EvaluationError,
    LearningRateSGD,
    LearningRateSGDNesterov,
    NegLogLearningLoss,
    NoLearningPenalty,
    OrtGradientForwardBackward,
    OrtGradientForwardBackwardOptimizer,
    SquareLearningLoss,
    add_loss_output,
    function_graphs as functions,
    function_onnx_graph,
    onnx_derivative,
    onnx_rename_names,
    select_model_inputs_outputs,
)
from tests.support.errors import naming
from tests.support.models import parse_model
from tests.support.public_names import arguments_of, resolve_name
from tests.support.running import in_sweep, run

# -- arguments and defaults ----------------------------------------------------------------------

TRAINING = """max_iter=100, training_optimizer_name='SGDOptimizer', batch_size=10,
    learning_rate='SGD', device='cpu', warm_start=False, verbose=0, validation_every=0.1"""
RATE = "eta0=0.01, alpha=0.0001, power_t=0.25, learning_rate='invscaling'"

SIGNATURES = {  # as they were
    "onnx_derivative": """onx, weights=None, inputs=None, options=DerivativeOptions.Zero, loss=None,
        label=None, path_name=None, verbose=0""",
    "random_feed": "inputs, batch=10, empty_dimension=1",
    "add_loss_output": """onx, score_name='squared_error', loss_name='loss', label_name='label',
        weight_name=None, penalty=None, output_index=None""",
    "get_train_initializer": "onx",
    "penalty_loss_onnx": "name, dtype, l1=None, l2=None, existing_names=None",
    "OrtGradientOptimizer": f"""model_onnx, weights_to_train, loss_output_name='loss', {TRAINING},
        saved_gradient=None, sample_weight_name='weight'""",
    "OrtGradientOptimizer.fit": "X, y, sample_weight=None, X_val=None, y_val=None",
    "OrtGradientOptimizer.get_state": "",
    "OrtGradientOptimizer.set_state": "state",
    "OrtGradientOptimizer.get_trained_onnx": "model=None",
    "OrtGradientForwardBackwardOptimizer": f"""model_onnx, weights_to_train=None,
        loss_output_name='loss', {TRAINING}, learning_loss='square_error', enable_logging=False,
        weight_name=None, learning_penalty=None, exc=True""",
    "OrtGradientForwardBackwardOptimizer.fit": "X, y, sample_weight=None, X_val=None, y_val=None",
    "OrtGradientForwardBackwardOptimizer.losses": "X, y, sample_weight=None",
    "OrtGradientForwardBackwardOptimizer.score": "X, y, sample_weight=None",
    "OrtGradientForwardBackwardOptimizer.get_state": "kind='weight'",
    "OrtGradientForwardBackwardOptimizer.get_full_state": "kind='weight'",
    "OrtGradientForwardBackwardOptimizer.get_trained_onnx": "model=None",
    "OrtGradientForwardBackwardOptimizer.save_onnx_graph": "folder, prefix=None, suffix=None",
    "OrtGradientForwardBackward": """onnx_model, weights_to_train=None, input_names=None,
        output_names=None, class_name=None, sess_options=None, providers=None,
        provider_options=None, run_options=None, graph_builder_config=None, device_index=0,
        enable_logging=False, debug=False""",
    "OrtGradientForwardBackward.new_instance": "",
    "OrtGradientForwardBackward.save_onnx_graph": "folder, prefix=None, suffix=None",
    "OrtGradientForwardBackwardFunction.forward": """inputs,
        training=False""",
    "OrtGradientForwardBackwardFunction.backward": "grad_outputs",
    "OrtGradientForwardBackwardFunction.save_onnx_graph": ("folder, prefix=None, suffix=None"),
    "OrtDataLoader": """X, y, sample_weight=None, batch_size=20, device='cpu', random_iter=True""",
    "OrtDataLoader.iter_numpy": "",
    "OrtDataLoader.iter_ortvalue": "",
    "OrtDataLoader.iter_bind": "bind, names",
    "LearningRateSGD": RATE,
    "LearningRateSGDNesterov": f"{RATE}, momentum=0.9, nesterov=True",
    "BaseLearningRate.select": "class_name",
    "BaseLearningRate.loop": "n=1000",
    "BaseLearningRate.init_learning_rate": "",
    "BaseLearningRate.update_learning_rate": "t",
    "BaseLearningRate.build_onnx_function": "opset, device, n_tensors",
    "SquareLearningLoss": "",
    "AbsoluteLearningLoss": "",
    "ElasticLearningLoss": "l1_weight=0.5, l2_weight=0.5",
    "NegLogLearningLoss": "eps=1e-5, probability_function='sigmoid'",
    "BaseLearningLoss.select": "class_name",
    "BaseLearningLoss.build_onnx_function": "opset, device, weight_name",
    "NoLearningPenalty": "",
    "ElasticLearningPenalty": "l1=0.5, l2=0.5",
    "BaseLearningPenalty.select": "class_name",
    "BaseLearningPenalty.build_onnx_function": "opset, device, n_tensors",
    "function_onnx_graph": "name, target_opset=None, dtype=np.float32, weight_name=None",
    "get_supported_functions": "",
    "get_onnx_opset": "onx, domain=''",
    "add_initializer": "model, name, value",
    "replace_initializers_into_onnx": "model, results",
    "onnx_rename_weights": "onx",
    "unreduced_onnx_loss": "onx, output_name='score'",
    "onnx_rename_names": "onx, strategy='simple'",
    "select_model_inputs_outputs": "onx, outputs=None, inputs=None",
    "plot_onnxs": "*onx, ax=None",
}
ELASTIC = {"l1_weight": 0.01, "l2_weight": 0.01}
FUNCTIONS = {  # of function_onnx_graph: options as they were, outputs
    "axpy": ({}, ["Y"]),
    "axpyw": ({}, ["Y", "Z"]),
    "axpyw2": ({}, ["Y", "Z"]),
    "copy": ({}, ["Y"]),
    "zero": ({}, ["Y"]),
    "linear_regression": ({}, ["Y"]),
    "square_error": ({"weight_name": None}, ["Y"]),
    "grad_square_error": ({"weight_name": None}, ["Y_grad"]),
    "grad_loss_square_error": ({"weight_name": None, "multiply": 2}, ["Y", "Y_grad"]),
    "grad_loss_absolute_error": ({"weight_name": None}, ["Y", "Y_grad"]),
    "grad_loss_elastic_error": ({"weight_name": None} | ELASTIC, ["Y", "Y_grad"]),
    "grad_penalty_elastic_error": (ELASTIC, ["Y", "Y_grad"]),
    "n_penalty_elastic_error": ({"weight_name": None, "n_tensors": 1} | ELASTIC, ["Y"]),
    "update_penalty_elastic_error": ({"l1": 1e-4, "l2": 1e-4}, ["Y"]),
    "grad_sigmoid_neg_log_loss_error": ({"eps": 1e-5, "weight_name": None}, ["Y", "Y_grad"]),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_their_order_and_defaults(name):
    """What was passed still goes to the argument of that name, and what was not, has its value."""
    there = arguments_of(eval(f"lambda {' '.join(SIGNATURES[name].split())}: 0"))
    here = arguments_of(resolve_name(name))
    assert [p.name for p in here[: len(there)]] == [p.name for p in there]
    for old, new in zip(there, here, strict=False):
        assert old.kind == new.kind
        if old.default is not old.empty:
            assert new.default == old.default
    for new in here[len(there) :]:  # additions are optional
        assert new.default is not new.empty or new.kind is new.VAR_KEYWORD


@pytest.mark.parametrize("name", FUNCTIONS)
def test_small_models(name):
    options, outputs = FUNCTIONS[name]
    found = {p.name: p.default for p in arguments_of(getattr(functions, name))}
    assert options.items() <= found.items()
    assert [y.name for y in function_onnx_graph(name).graph.output] == outputs
    assert {"draft"} | options.keys() | {"shape", "loss_shape", "multiply"} >= set(found)


# -- calls ---------------------------------------------------------------------------------------

RNG = np.random.default_rng(0)
X, NOISE = RNG.standard_normal((2, 20, 3)).astype(np.float32)
Y = X @ np.float32([[1], [-2], [3]]) + 0.1 * NOISE[:, :1]
START = {"w": np.float32([[0.1], [0.2], [-0.3]]), "b": np.float32([0.5])}


def three_column_model() -> onnx.ModelProto:
    text = "g (float[N,3] x) => (float[N,1] y) { h = MatMul(x, w)  y = Add(h, b) }"
    return parse_model(text, **START)


def test_options_go_with_the_name_of_a_class():
    assert BaseLearningLoss.select(class_name="SquareLearningLoss") == SquareLearningLoss()
    assert BaseLearningLoss.select(class_name="absolute") == AbsoluteLearningLoss()
    assert BaseLearningLoss.select(class_name="elastic") == ElasticLearningLoss()
    assert BaseLearningLoss.select(class_name="log", eps=0.1) == NegLogLearningLoss(0.1)
    chosen = BaseLearningPenalty.select(class_name="elastic", l1=0.1)
    assert chosen == ElasticLearningPenalty(l1=0.1)
    assert BaseLearningPenalty.select(class_name=None) == NoLearningPenalty()
    rate = BaseLearningRate.select(class_name="SGD", eta0=0.1, learning_rate="constant")
    assert rate.get_params() == LearningRateSGD(0.1, learning_rate="constant").get_params()
    assert BaseLearningRate.select("Nesterov", momentum=0.5).momentum == 0.5
    assert BaseLearningRate.select(LearningRateSGDNesterov, eta0=0.5).eta0 == 0.5
    assert BaseLearningRate.select(0.5, power_t=1.0).power_t == 1.0
    with pytest.raises(ValueError, match=naming("'SGD'", "'momentum'")):
        BaseLearningRate.select("SGD", momentum=0.5)
    with pytest.raises(ValueError, match=naming("instance", "['eta0']")):
        BaseLearningRate.select(rate, eta0=0.5)


@pytest.mark.parametrize(
    ("kind", "as_ortvalue"),
    [
        ("sgd", True),
        ("nesterov", False),
        ("heavy ball", True),
        *map(in_sweep, ["sgd", "nesterov", "heavy ball"], [False, True, False]),
    ],
)
def test_a_loop_of_ones_own_is_the_trainer(kind, as_ortvalue):
    """Forward, loss, backward, penalty and update one by one, on OrtValues as well."""
    options = {"learning_rate": "constant"}
    rate = LearningRateSGD(0.1, **options)
    if kind != "sgd":
        rate = LearningRateSGDNesterov(0.1, nesterov=kind == "nesterov", **options)
    loss = BaseLearningLoss.select("square_error").build_onnx_function(18, "cpu", None)
    rate.build_onnx_function(18, "cpu", 2)
    rate.init_learning_rate()
    passes = OrtGradientForwardBackward(three_column_model(), ["w", "b"]).new_instance()
    held = ort.OrtValue.ortvalue_from_numpy if as_ortvalue else np.copy
    weights = [held(a) for a in START.values()]
    velocities = [held(np.zeros_like(a)) for a in START.values()]
    for _ in range(5):
        [f] = passes.forward([held(X), *weights], training=True)
        _, gradient = loss.loss_gradient(held(Y), f)
        for i, g in enumerate(passes.backward([gradient])[1:]):
            if rate.needs_grad:
                weights[i], velocities[i] = rate.update_weights(
                    weights[i], g, 20, velocity=velocities[i]
                )
            else:
                weights[i] = rate.update_weights(weights[i], g, 20)
    assert all(isinstance(w, ort.OrtValue) == as_ortvalue for w in weights)
    rate = type(rate)(**rate.get_params())
    trainer = OrtGradientForwardBackwardOptimizer(
        three_column_model(),
        ["w", "b"],
        learning_rate=rate,
        batch_size=20,
        max_iter=5,
        random_state=0,
    ).fit(X, Y)
    for found, expected in zip(weights, trainer.trained_coef_.values(), strict=True):
        array = found.numpy() if as_ortvalue else found
        np.testing.assert_allclose(array, expected.numpy(), rtol=1e-5)


def test_updates_in_float64():
    rate = LearningRateSGDNesterov(0.5).init_learning_rate()
    rate.build_onnx_function(18, "cpu", 1, np.float64)
    w, g, v = RNG.standard_normal((3, 2, 4))
    moved, kept = rate.update_weights(w, g, 10, velocity=v)
    np.testing.assert_allclose(kept, 0.9 * v - 0.05 * g, rtol=1e-12)
    np.testing.assert_allclose(moved, w + 0.9 * kept - 0.05 * g, rtol=1e-12)
    rate.build_onnx_function()
    assert rate.update_weights(*np.float32([w, g]), 10, np.float32(v))[0].dtype == np.float32


@pytest.mark.parametrize(
    ("rate", "given", "error", "text"),
    [
        (LearningRateSGD(), {"velocity": np.float32(0)}, ValueError, "momentum"),
        (LearningRateSGDNesterov(), {}, ValueError, "velocity"),
        (LearningRateSGD(), {"gradient": np.zeros((3, 1), "f")}, ValueError, r"\(3, 1\)"),
        (LearningRateSGD(), {"gradient": np.zeros(3)}, ValueError, "float64"),
        (None, {}, EvaluationError, "init_learning_rate"),
    ],
)
def test_updates_that_cannot_be(rate, given, error, text):
    rate = LearningRateSGD() if rate is None else rate.init_learning_rate()
    with pytest.raises(error, match=text):
        rate.update_weights(**{"weight": np.zeros(3, "f"), "gradient": np.zeros(3, "f")} | given)


@pytest.mark.parametrize(
    "call",
    [  # as they were called
        lambda: SquareLearningLoss().build_onnx_function().loss_gradient("cpu", Y, X[:, :1]),
        lambda: SquareLearningLoss().build_onnx_function().loss_scores("cpu", Y, X[:, :1]),
        lambda: two_penalties().penalty_loss("cpu", np.float32([[1]]), *START.values()),
        lambda: two_penalties().penalty_loss(np.float32([[1]]), *START.values()),
        lambda: (
            LearningRateSGD()
            .init_learning_rate()
            .update_weights(0, "cpu", START["w"], START["w"], 10)
        ),
        lambda: onnx_rename_names(three_column_model(), 1),  # verbose
        lambda: OrtGradientForwardBackwardOptimizer(three_column_model()).set_state(
            list(START.values())
        ),
    ],
)
def test_calls_that_mean_something_else_raise(call):
    with pytest.raises((TypeError, ValueError)):
        call()


def two_penalties() -> ElasticLearningPenalty:
    return ElasticLearningPenalty().build_onnx_function(n_tensors=2)


def test_the_graphs_that_are_kept_as_attributes():
    trainer = OrtGradientForwardBackwardOptimizer(
        three_column_model(), learning_rate="Nesterov", learning_penalty="elastic", max_iter=1
    ).fit(X, Y)
    saved = trainer.save_onnx_graph(bytes)
    assert list(saved["learning_loss"]) == ["loss_grad_onnx_", "loss_score_onnx_"]
    assert set(saved["learning_penalty"]) == {"penalty_onnx_", "penalty_grad_onnx_"}
    assert "zero_onnx_" in saved
    model = onnx.load_from_string(saved["learning_rate"]["axpyw_onnx_"])
    assert model == trainer.learning_rate.axpyw_onnx_
    assert LearningRateSGD().axpy_onnx_ == function_onnx_graph("axpy")
    model = onnx.load_from_string(saved["learning_loss"]["loss_grad_onnx_"])
    assert [y.name for y in model.graph.output] == ["Y", "Y_grad"]


def test_names_of_saved_files(tmp_path):
    trainer = OrtGradientForwardBackwardOptimizer(three_column_model(), ["w", "b"])
    passes = OrtGradientForwardBackward(three_column_model(), ["w", "b"], class_name="Linear")
    for saver, plain in (
        (trainer, "learning_loss.loss_grad_onnx_"),
        (passes, "Linear._backward_onnx"),
        (passes.new_instance(), "Linear._backward_onnx"),
    ):
        names = [path.name for path in saved_files(saver.save_onnx_graph(tmp_path))]
        assert f"{plain}.onnx" in names
        changed = [
            p.name for p in saved_files(saver.save_onnx_graph(tmp_path, "run1.", suffix="_v2"))
        ]
        assert changed == [f"run1.{name.removesuffix('.onnx')}_v2.onnx" for name in names]
        given = saver.save_onnx_graph(bytes, prefix="a", suffix="b")
        assert given == saver.save_onnx_graph(bytes)


def saved_files(saved: dict) -> list[Path]:
    """Return the paths, all of which exist."""
    flat = [saved_files(v) if isinstance(v, dict) else [Path(v)] for v in saved.values()]
    assert all(path.is_file() for paths in flat for path in paths)
    return [path for paths in flat for path in paths]


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("ConvergenceError", RuntimeError),
        ("ConvergenceWarning", UserWarning),
        ("EvaluationError", RuntimeError),
        ("ProviderError", ValueError),
    ],
)
def test_classes_of_errors(name, base):
    assert issubclass(resolve_name(name), base)


# -- listings of the notebook on stochastic gradient descent ---------------------------------------

NOTEBOOK = """<ir_version: 8, opset_import: ["": 14]> g (float[N,2] x) => (float[N,1] y)
    <float[1,2] init = {0.5, -0.33333}, float[1,2] init_1 = {-2, 3}, int64[1] init_2 = {1},
     int64[1] init_3 = {2}, int64[1] init_5 = {0}, float[1] init_b10 = {-1},
     int64[2] init_b11 = {-1, 1}> {
        out_mul_0 = Mul(x, x)  out_mul_0_1 = Mul(out_mul_0, init)  out_mul_0_2 = Mul(x, init_1)
        out_add_0 = Add(out_mul_0_2, out_mul_0_1)
        out_sli_0 = Slice(out_add_0, init_2, init_3, init_2)
        out_squ_0 = Squeeze(out_sli_0, init_2)
        out_sli_0_1 = Slice(out_add_0, init_5, init_2, init_2)
        out_squ_0_1 = Squeeze(out_sli_0_1, init_2)
        out_add_0_1 = Add(out_squ_0_1, out_squ_0)  out_add_0_2 = Add(out_add_0_1, init_b10)
        y = Reshape(out_add_0_2, init_b11) }"""
WEIGHTS = ["init", "init_1", "init_b10"]


def names_and_shapes(values) -> list[tuple[str, list[int | str]]]:
    return [
        (v.name, [d.dim_value or d.dim_param for d in v.type.tensor_type.shape.dim]) for v in values
    ]


def test_the_notebook_step_by_step():
    f = parse_model(NOTEBOOK)
    x = np.float32([[0, 0], [1, 0], [0, 1], [1, 1], [2, 2]])
    expected = np.float32([[-1], [-2.5], [1.6666701], [0.16667008], [1.6666799]])
    np.testing.assert_allclose(run(f, x=x)[0], expected, rtol=1e-6)

    shapes = [("init", [1, 2]), ("init_1", [1, 2]), ("init_b10", [1])]
    gradients = [(f"{name}_grad", shape) for name, shape in shapes]
    grad = onnx_derivative(f)
    for made in (grad, onnx_rename_names(grad)):
        assert names_and_shapes(made.graph.input) == [
            ("x", ["N", 2]),
            *shapes,
            ("y_grad", ["N", 1]),
        ]
        assert names_and_shapes(made.graph.output) == [("x_grad", ["N", 2]), *gradients]
    initializers = [t.name for t in onnx_rename_names(grad).graph.initializer]
    assert initializers == [f"i{i}" for i in range(len(initializers))]

    loss = add_loss_output(f)
    assert names_and_shapes(loss.graph.input) == [("x", ["N", 2]), ("label", ["N", 1])]
    assert names_and_shapes(loss.graph.output) == [("loss", [1, 1]), ("y", ["N", 1])]
    assert [t.name for t in loss.graph.initializer][:7] == [t.name for t in f.graph.initializer]
    alone = select_model_inputs_outputs(loss, outputs=["loss"])
    assert names_and_shapes(alone.graph.output) == [("loss", [1, 1])]
    flags = DerivativeOptions.FillGrad | DerivativeOptions.KeepOutputs
    both = onnx_rename_names(onnx_derivative(alone, options=flags))
    data = [("x", ["N", 2]), ("label", ["N", 1])]
    assert names_and_shapes(both.graph.input) == [*data, *shapes]
    assert names_and_shapes(both.graph.output) == [
        ("x_grad", ["N", 2]),
        ("label_grad", ["N", 1]),
        *gradients,
        ("loss", [1, 1]),
    ]


def test_the_pictures_of_an_addition():
    """X + Ad_Addcst, with every option that has a picture."""
    f = parse_model(
        "g (float[N,10] X) => (float[N,10] Y) <float[1] Ad_Addcst = {1}> { Y = Add(X, Ad_Addcst) }"
    )
    inputs, outputs = ["X", "Ad_Addcst"], ["X_grad", "Ad_Addcst_grad"]
    flags = DerivativeOptions
    for options, more_in, more_out in (
        (flags.Zero, ["Y_grad"], []),
        (flags.KeepOutputs, ["Y_grad"], ["Y"]),
        (flags.KeepOutputs | flags.FillGrad, [], ["Y"]),
        (flags.KeepYieldOp, [], []),
    ):
        graph = onnx_derivative(f, options=options).graph
        assert [v.name for v in graph.input] == inputs + more_in
        assert [v.name for v in graph.output] == outputs + more_out
    [node] = [node for node in graph.node if node.op_type == "YieldOp"]
    assert (list(node.input), list(node.output)) == (["Y"], ["Y_grad"])
    [attribute] = node.attribute
    assert (attribute.name, list(attribute.ints)) == ("full_shape_outputs", [0])
