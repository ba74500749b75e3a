"""Operators of `ai.onnx.ml`: what they are lowered to computes what onnxruntime computes."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import pytest

from onnxgrad import ModelError, NoGradientRule, check_gradient, onnx_derivative
from onnxgrad.autodiff.primal.prepare import prepare
from onnxgrad.graph import get_train_initializer
from onnxgrad.model.convert import to_proto
from onnxgrad.model.weights import replace_constants
from onnxgrad.operators import marks
from tests.support.errors import naming
from tests.support.models import add_initializers, parse_model
from tests.support.running import in_sweep, run, run_named
from tests.support.signatures import output_names

ORDERS = pytest.mark.parametrize("order", [1, in_sweep(2)])  # the report of 2 has that of 1
RNG = np.random.default_rng(0)
X = RNG.standard_normal((6, 3)).astype(np.float32)
FLOATS = ", ".join(f"{v:.3f}" for v in RNG.standard_normal(12))
POSTS = ("NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO")
DTYPES = {"float": np.float32, "double": np.float64, "int64": np.int64, "int32": np.int32}


def ml_model(node: str, kind: str = "float", label: str = "") -> onnx.ModelProto:
    """Return the model of a node of x, which returns y, and with a type `label` k before y."""
    outputs = f"{label}[N] k, float[N,M] y" if label else "float[N,M] y"
    results = "k, y" if label else "y"
    text = f"g ({kind}[N,3] x) => ({outputs}) {{ {results} = ai.onnx.ml.{node}(x) }}"
    return parse_model(text)


def float_list(values) -> str:
    """Return numbers as the parser reads them."""
    return str([float(v) for v in np.ravel(values)])


def gradient_by_x(made: onnx.ModelProto, x, g) -> np.ndarray:
    """Return the gradient by x of a gradient model of x and y."""
    return run_named(made, x=np.float32(x), y_grad=np.float32(g))["x_grad"]


def check_lowered(model: onnx.ModelProto, x: np.ndarray = X, atol: float = 2e-7) -> None:
    lowered = to_proto(prepare(model))
    assert all(node.domain != "ai.onnx.ml" for node in lowered.graph.node)
    for found, expected in zip(run(lowered, x=x), run(model, x=x), strict=True):
        if expected.dtype.kind == "f":
            np.testing.assert_allclose(found, expected, rtol=2e-6, atol=atol)
        else:
            np.testing.assert_array_equal(found, expected)
        assert found.shape == expected.shape


def check_slopes(model: onnx.ModelProto, x: np.ndarray = X, **options) -> None:
    report = check_gradient(model, feed={"x": x}, **options)
    assert report.ok, str(report)


REGRESSORS = {
    "one target": "LinearRegressor<coefficients=[0.5, -1.0, 2.0], intercepts=[0.3]>",
    "no intercept": "LinearRegressor<coefficients=[0.5, -1.0, 2.0]>",
    "four": f"LinearRegressor<coefficients=[{FLOATS}], intercepts=[1.0,2.0,3.0,4.0], targets=4>",
}
for post in POSTS:
    REGRESSORS[post] = (
        f'LinearRegressor<coefficients=[{FLOATS}], targets=4, post_transform="{post}">'
    )


@pytest.mark.parametrize("node", REGRESSORS.values(), ids=REGRESSORS)
def test_linear_regressor(node):
    check_lowered(ml_model(node))
    check_slopes(ml_model(node))


CLASSIFIERS = {}
for classes, rows in ((2, 1), (2, 2), (3, 3), (4, 4)):
    coefficients = ", ".join(f"{v:.3f}" for v in RNG.standard_normal(3 * rows))
    intercepts = ", ".join(f"{v:.3f}" for v in RNG.standard_normal(rows))
    for labels in ("ints", "strings"):
        names = [f'"c{i}"' if labels == "strings" else str(7 - i) for i in range(classes)]
        for post in POSTS:
            CLASSIFIERS[f"{classes} {rows} {labels} {post}"] = (
                f"LinearClassifier<coefficients=[{coefficients}], intercepts=[{intercepts}], "
                f'classlabels_{labels}=[{", ".join(names)}], post_transform="{post}", '
                f"multi_class={classes % 2}>",
                "int64" if labels == "ints" else "string",
            )


@pytest.mark.parametrize(
    "case", [name if i % 5 == 0 else in_sweep(name) for i, name in enumerate(CLASSIFIERS)]
)
def test_linear_classifier(case):
    node, label = CLASSIFIERS[case]
    model = ml_model(node, label=label)
    check_lowered(model)
    check_lowered(model, np.zeros((2, 3), np.float32))
    if label == "int64":
        check_slopes(model)


@pytest.mark.parametrize("targets", [in_sweep(1), 3])
def test_probit(targets):
    """The approximation of onnxruntime, whose own digits end near 1/2; there the limit is taken."""
    values = np.linspace(-0.1, 0.15, 3 * targets)
    node = f"""LinearRegressor<coefficients={float_list(values)}, targets={targets},
        intercepts={float_list([0.5] * targets)}, post_transform="PROBIT">"""
    check_lowered(ml_model(node), X, atol=5e-4)
    check_slopes(ml_model(node), order=2)
    made = onnx_derivative(ml_model(node), weights=[])
    found = gradient_by_x(made, np.zeros((1, 3)), np.ones((1, targets)))
    slope = np.sqrt(2 * np.pi) * values.reshape(targets, 3).sum(0)
    np.testing.assert_allclose(found, [slope], rtol=1e-6)


def test_softmax_zero_leaves_zeros_out():
    identity = float_list(np.eye(3))
    node = f'LinearRegressor<coefficients={identity}, targets=3, post_transform="SOFTMAX_ZERO">'
    x = np.float32([[0, 1, 2], [-100, -101, -102], [100, 0, 0], [-1, 0, 3]])
    check_lowered(ml_model(node), x)
    check_slopes(ml_model(node), order=2)
    found = gradient_by_x(onnx_derivative(ml_model(node), weights=[]), x, np.ones((4, 3)))
    assert np.isfinite(found).all()


@pytest.mark.parametrize(
    "options", ["offset=[1.0, 2.0, 3.0], scale=[0.5, 2.0, -1.0]", "offset=[1.0], scale=[0.5]"]
)
def test_scaler(options):
    model = ml_model(f"Scaler<{options}>")
    check_lowered(model)
    report = check_gradient(model, weights=["y.offset", "y.scale"], feed={"x": X})
    assert report.ok, str(report)
    assert len(report.rows) == 4


PLAIN = {  # a node of each operator, and the type of its labels
    "Scaler": ("Scaler<offset=[1.0, 2.0, 3.0], scale=[0.5, 2.0, -1.0]>", ""),
    "Normalizer": ('Normalizer<norm="L2">', ""),
    "LinearRegressor": (REGRESSORS["four"], ""),
    "LinearClassifier": CLASSIFIERS["3 3 ints SOFTMAX"],
}


@pytest.mark.parametrize("kind", ["double", "int64", "int32"])
@pytest.mark.parametrize("name", ["Scaler", "Normalizer", "LinearClassifier"])
def test_other_inputs(name, kind):
    node, label = PLAIN[name]
    check_lowered(ml_model(node, kind, label), (10 * X).astype(DTYPES[kind]))


@pytest.mark.parametrize("norm", ["MAX", "L1", "L2"])
def test_normalizer(norm):
    model = ml_model(f'Normalizer<norm="{norm}">')
    rows = np.vstack([X, -abs(X), np.zeros((1, 3))]).astype(np.float32)
    check_lowered(model, rows)
    check_slopes(model, rows[:-1])
    assert np.isfinite(gradient_by_x(onnx_derivative(model), rows, np.ones_like(rows))).all()


# -- where onnxruntime leaves the specification --------------------------------------------------


@pytest.mark.parametrize("post", POSTS)
def test_one_score_is_handed_on_as_it_is(post):
    check_lowered(
        ml_model(f'LinearRegressor<coefficients=[0.5, -1.0, 2.0], post_transform="{post}">')
    )
    node = f"""LinearClassifier<coefficients=[0.5, -1.0, 2.0], intercepts=[0.3],
        post_transform="{post}">"""
    check_lowered(ml_model(node, label="int64"))  # without class labels, they are 0 and 1
    pair = node.replace("intercepts", "classlabels_ints=[3, 4], intercepts")
    check_lowered(ml_model(pair, label="int64"))
    check_slopes(ml_model(pair, label="int64"))


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_of_equal_scores_the_first_wins(rows):
    """And a single score of zero is that of the first of two classes."""
    zeros = ", ".join(["0.0"] * 3 * rows)
    node = f"""LinearClassifier<coefficients=[{zeros}], intercepts=[{", ".join(["0.0"] * rows)}],
        classlabels_ints=[{"7, 5" if rows < 3 else "7, 5, 9"}]>"""
    check_lowered(ml_model(node, label="int64"))


def test_post_transforms_that_are_refused():
    """Half of what onnxruntime returns for PROBIT of two classes is not even set."""
    linear = """LinearClassifier<classlabels_ints=[3, 4], coefficients=[0.5, -1.0, 2.0],
        intercepts=[0.3], post_transform="PROBIT">"""
    for node in (linear, svm_classifier(2, "LINEAR", 'post_transform="PROBIT"')):
        with pytest.raises(NoGradientRule, match="PROBIT"):
            onnx_derivative(ml_model(node, label="int64"))
    node = 'LinearRegressor<coefficients=[0.5, -1.0, 2.0], post_transform="TANH">'
    with pytest.raises(NoGradientRule, match="post_transform 'TANH'"):
        onnx_derivative(ml_model(node))


@pytest.mark.parametrize("targets", [1, 2])
@pytest.mark.parametrize("intercepts", [1, 2, 3])
def test_intercepts_of_another_number_are_not_read(targets, intercepts):
    coefficients = ", ".join(FLOATS.split(", ")[: 3 * targets])
    values = ", ".join("1.5 2.5 3.5".split()[:intercepts])
    node = f"LinearRegressor<coefficients=[{coefficients}], targets={targets}"
    model = ml_model(f"{node}, intercepts=[{values}]>")
    check_lowered(model)
    gradients = output_names(onnx_derivative(model))
    assert ("y.intercepts_grad" in gradients) == (targets == intercepts)


@pytest.mark.parametrize(
    ("coefficients", "intercepts", "opposite"),
    [
        ([1, -2, 0.5, -1, 2, -0.5], [-0.3, 0.3], True), ([1, -2, 0.5, -1, 2, -0.5], [], True),
        ([1, -2, 0.5, -1, 2, -0.500001], [-0.3, 0.3], True),
        ([1, -2, 0.5, -1, 2, -0.501], [-0.3, 0.3], False),
        ([1, -2, 0.5, -1, 2, -0.5], [0.3, 0.3], False), ([1, -2, 0.5, -1, 2], [-0.3, 0.3], False),
        ([1, -2, 0.5, -1, 2, -0.5, 1, 1, 1], [1, -1, 0], False),
    ],
)  # fmt: skip
def test_opposite_scores_of_two_classes_are_noted(coefficients, intercepts, opposite):
    rows = f"coefficients={float_list(coefficients)}"
    rows += f", intercepts={float_list(intercepts)}" if intercepts else ""
    classes = list(range(max(2, len(intercepts))))
    node = f"LinearClassifier<{rows}, classlabels_ints={classes}>"
    values = (y for n in prepare(ml_model(node, label="int64")).graph for y in n.outputs)
    assert any(marks.OPPOSITE in y.meta for y in values) == opposite


def test_more_classes_than_scores():
    for post in ("NONE", "LOGISTIC", "SOFTMAX"):
        node = f"""LinearClassifier<coefficients=[{", ".join(FLOATS.split(", ")[:6])}],
            intercepts=[0.1, 0.2], classlabels_strings=["a", "b", "c"], post_transform="{post}">"""
        check_lowered(ml_model(node, label="string"))


@pytest.mark.parametrize("name", PLAIN)
def test_a_vector_is_one_row(name):
    node, label = PLAIN[name]
    check_lowered(model_of_vector_of_3(ml_model(node, label=label)), X[0])


def model_of_vector_of_3(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model of a vector instead of rows."""
    del model.graph.input[0].type.tensor_type.shape.dim[0]
    for y in model.graph.output:
        y.type.tensor_type.ClearField("shape")
    return model


def test_scaler_of_doubles_subtracts_before_it_rounds():
    model = ml_model("Scaler<offset=[1000000000.0], scale=[1.0]>", "double")
    check_lowered(model, X.astype(np.float64) + 1e9)


def test_a_row_of_norm_zero_stays_as_it_is():
    g = np.float32([[1, 2, 3]])
    for norm in ("MAX", "L1", "L2"):
        model = ml_model(f'Normalizer<norm="{norm}">')
        check_lowered(model, np.float32([[1e-30, 0, 0], [-1e-38, 1e-38, 0], [-1, 0, -1]]))
        found = gradient_by_x(onnx_derivative(model), 0 * g, g)
        np.testing.assert_array_equal(found, g)


# -- support vector machines -----------------------------------------------------------------------

KERNELS = ("LINEAR", "POLY", "RBF", "SIGMOID")


def kernel_text(name: str, degree: float = 3.0) -> str:
    return f'kernel_type="{name}", kernel_params=[0.3, 0.4, {degree}]'


def svm_regressor(count: int, kernel_name: str, more: str = "", degree: float = 3.0) -> str:
    rng = np.random.default_rng(1)
    vectors = f"support_vectors={float_list(rng.standard_normal(3 * count))}, " if count else ""
    return f"""SVMRegressor<n_supports={count}, {kernel_text(kernel_name, degree)}, {vectors}
        coefficients={float_list(rng.standard_normal(count or 3))}, rho=[0.7, 9.0]
        {", " + more if more else ""}>"""


def svm_classifier(
    classes: int, kernel_name: str, more: str = "", sizes=(2, 1, 3, 1), strings: bool = False
) -> str:
    """Return a classifier; without `sizes`, of vectors per class, one of the linear mode."""
    rng = np.random.default_rng(2)
    pairs, count = max(1, classes * (classes - 1) // 2), sum(sizes[:classes])
    vectors = f"""vectors_per_class={list(sizes[:classes])},
        support_vectors={float_list(rng.standard_normal(3 * count))}, """
    labels = [f'"c{i}"' if strings else str(7 - 2 * i) for i in range(classes)]
    rows = (classes - 1) * count if count else 3 * classes
    coefficients, rho = (float_list(rng.standard_normal(n)) for n in (rows, pairs))
    return f"""SVMClassifier<{kernel_text(kernel_name)}, {vectors if count else ""}
        coefficients={coefficients}, rho={rho},
        classlabels_{"strings" if strings else "ints"}=[{", ".join(labels)}]
        {", " + more if more else ""}>"""


def probabilities(classes: int) -> str:
    pairs = classes * (classes - 1) // 2
    a, b = np.linspace(-2, -0.5, pairs), np.linspace(-0.3, 0.4, pairs)
    return f"prob_a={float_list(a)}, prob_b={float_list(b)}"


MACHINES = list(itertools.product(KERNELS, (0, 1, 5), (1.0, 2.0, 3.0, 4.0), (1, 2)))
FEW_MACHINES = [("LINEAR", 0, 3.0, 1), ("LINEAR", 5, 3.0, 1), ("POLY", 5, 1.0, 1),
                ("POLY", 5, 3.0, 1), ("RBF", 1, 3.0, 1), ("SIGMOID", 5, 3.0, 1)]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "count", "degree", "order"),
    [m if m in FEW_MACHINES else in_sweep(*m) for m in MACHINES],
)
def test_svm_regressor(name, count, degree, order):
    model = ml_model(svm_regressor(count, name, degree=degree))
    check_lowered(model, atol=2e-6)
    names = ["y.coefficients", "y.rho"] + ["y.support_vectors"] * bool(count)
    check_slopes(model, weights=names, order=order)


def test_svm_regressor_transforms_nothing():
    """onnxruntime reads post_transform, and forgets it."""
    for post in (*POSTS, "PROBIT"):
        check_lowered(ml_model(svm_regressor(4, "RBF", f'post_transform="{post}"')), atol=2e-6)


def test_the_sign_of_a_one_class_machine_has_no_gradient():
    model = ml_model(svm_regressor(4, "RBF", "one_class=1"))
    check_lowered(model)
    with pytest.raises(ValueError, match=naming("'x'", "differentiable path")):
        onnx_derivative(model)


VOTES = list(itertools.product(KERNELS, (2, 3, 4), POSTS, (1, 2)))
FEW_VOTES = [("LINEAR", 2, "NONE", 1), ("POLY", 3, "LOGISTIC", 1), ("RBF", 3, "SOFTMAX", 1),
             ("RBF", 2, "SOFTMAX_ZERO", 1), ("SIGMOID", 2, "SOFTMAX", 1)]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "classes", "post", "order"), [v if v in FEW_VOTES else in_sweep(*v) for v in VOTES]
)
def test_svm_classifier(name, classes, post, order):
    for sizes in ((2, 1, 3, 1), (0, 2, 1, 2), (0,)):  # the last without support vectors
        nodes = [
            svm_classifier(classes, name, f'post_transform="{post}"', sizes, strings)
            for strings in (False, True)
        ]
        models = [
            ml_model(node, label=label)
            for node, label in zip(nodes, ("int64", "string"), strict=True)
        ]
        for model in models:
            check_lowered(model, atol=3e-6)
        check_slopes(models[0], order=order)


@ORDERS
@pytest.mark.parametrize("name", [in_sweep("LINEAR"), "RBF"])
def test_svm_probabilities(name, order):
    """onnxruntime iterates toward them, and stops within 0.005 (measured)."""
    model = ml_model(svm_classifier(2, name, probabilities(2)), label="int64")
    check_lowered(model, atol=6e-3)
    report = check_gradient(model, feed={"x": X}, order=order)
    assert all(row.ok for row in report.rows[1:]), str(report)
    assert {"k.prob_a", "k.prob_b"} <= {row.name for row in report.rows}


def test_svm_labels_without_support_vectors():
    """Of two classes, the second wins above a threshold that depends on the signs."""
    for coefficients in ("0.1, 0.2, 0.1, 0.3, 0.1, 0.2", "0.1, -0.2, 0.1, 0.3, -0.1, 0.2"):
        for more in ("", ", prob_a=[-1.0], prob_b=[0.0]"):
            node = f"""SVMClassifier<{kernel_text("LINEAR")}, rho=[0.1],
                coefficients=[{coefficients}], classlabels_ints=[5, 3]{more}>"""
            check_lowered(
                ml_model(node, label="int64"), RNG.standard_normal((40, 3)).astype(np.float32)
            )


@pytest.mark.parametrize("kind", ["double", "int64", "int32"])
def test_svm_classifier_of_other_inputs(kind):
    dtype = DTYPES[kind]
    for sizes in ((2, 1, 3), (0,)):
        model = ml_model(svm_classifier(3, "RBF", sizes=sizes), kind, "int64")
        check_lowered(model, (3 * X).astype(dtype), atol=3e-6)
        if kind == "double":
            check_slopes(model)


def test_a_vector_is_one_row_of_a_machine():
    for node, label in (
        (svm_regressor(4, "RBF"), ""),
        (svm_regressor(0, "LINEAR"), ""),
        (svm_classifier(3, "RBF"), "int64"),
        (svm_classifier(3, "LINEAR", sizes=(0,)), "int64"),
    ):
        model = model_of_vector_of_3(ml_model(node, label=label))
        model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "M"
        check_lowered(model, X[0], atol=3e-6)
        model.graph.input[0].type.tensor_type.ClearField("shape")
        check_lowered(model, X[0], atol=3e-6)


def test_far_from_the_origin_the_distance_keeps_its_digits():
    node = """SVMRegressor<n_supports=1, kernel_type="RBF", kernel_params=[0.5, 0.0, 0.0],
        support_vectors=[1000.0, 1001.0, 1002.0], coefficients=[1.0], rho=[0.0]>"""
    check_lowered(ml_model(node), X + np.float32([1000, 1001, 1002]), atol=1e-6)


def test_machines_that_are_refused():
    one = f"""SVMClassifier<{kernel_text("RBF")}, vectors_per_class=[1],
        support_vectors=[1.0, 2.0, 3.0], coefficients=[1.0], rho=[0.0], classlabels_ints=[1]>"""
    with pytest.raises(NoGradientRule, match=naming("SVMClassifier", "one class")):
        onnx_derivative(ml_model(one, label="int64"))
    for classes in (3, 5):
        coupled = ml_model(svm_classifier(classes, "RBF", probabilities(classes)), label="int64")
        with pytest.raises(NoGradientRule, match=naming("SVMClassifier", "'y'", "probability=Fal")):
            onnx_derivative(coupled)
    with pytest.raises(NoGradientRule, match=naming("coefficients", "rho")):
        onnx_derivative(
            ml_model(f"SVMRegressor<{kernel_text('LINEAR')}, coefficients=[1.0, 2.0, 3.0]>")
        )


def test_coefficients_of_machines_are_weights_and_written_back():
    model = ml_model(svm_classifier(2, "RBF", probabilities(2)), label="int64")
    names = [f"k.{n}" for n in ("coefficients", "rho", "prob_a", "prob_b")]
    assert list(get_train_initializer(model)) == names
    values = {n: v + 1 for n, (v, _) in get_train_initializer(model).items()}
    values["k.support_vectors"] = np.arange(9, dtype=np.float32)
    made = replace_constants(model, values)
    [node] = made.graph.node
    kept = {a.name: list(a.floats) for a in node.attribute if a.floats}
    for name, value in values.items():
        np.testing.assert_array_equal(kept[name.split(".")[1]], value)
    check_lowered(made, atol=6e-3)


# -- what prepares the features --------------------------------------------------------------------


def model_of_inputs(body: str, *inputs: str, kind: str = "float") -> onnx.ModelProto:
    """Return a model of some inputs, and an output of unknown shape."""
    text = f"g ({', '.join(inputs)}) => ({kind} y) {{ y = ai.onnx.ml.{body} }}"
    return parse_model(text, output_shapes=False)


def check_all_shapes(model: onnx.ModelProto, feed: dict, order: int) -> None:
    """Check values, and gradients up to an order, of the shapes known, the rank, or nothing."""
    (expected,) = run(model, feed)
    for known in ("lengths", "rank", "nothing"):
        made = onnx.ModelProto.FromString(model.SerializeToString())
        for x in made.graph.input:
            if known == "nothing":
                x.type.tensor_type.ClearField("shape")
            for i, d in enumerate(x.type.tensor_type.shape.dim):
                if known == "rank":
                    d.dim_param = f"{x.name}{i}"
        (found,) = run(to_proto(prepare(made)), feed)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)
        if order:
            report = check_gradient(made, feed=feed, order=order)
            assert report.ok, f"{known}\n{report}"


@ORDERS
@pytest.mark.parametrize("shape", [(3,), (4, 3), in_sweep((2, 3, 3)), in_sweep((2, 3, 2)), (0, 3)])
@pytest.mark.parametrize("count", [1, in_sweep(2), 3])
def test_imputer_of_nan(shape, count, order):
    x = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    x[x > 0.5] = np.nan
    sizes = ",".join(map(str, shape))
    node = (
        f"Imputer<imputed_value_floats={float_list(range(5, 5 + count))}, replaced_value_float=nan>"
    )
    model = model_of_inputs(f"{node}(x)", f"float[{sizes}] x")
    check_all_shapes(model, {"x": x}, order if x.size else 0)
    if x.size:
        name = "y.imputed_value_floats"
        assert check_gradient(model, weights=[name], feed={"x": x}).ok


def test_imputer_of_a_number():
    node = "Imputer<imputed_value_floats=[7.0, 8.0, 9.0], replaced_value_float=2.0>(x)"
    x = np.float32([[1, 2, 3], [2, 2, 0]])
    model = model_of_inputs(node, "float[2,3] x")
    check_all_shapes(model, {"x": x}, 0)
    found = gradient_by_x(onnx_derivative(model, weights=[]), x, np.ones((2, 3)))
    np.testing.assert_array_equal(found, x != 2)


def test_imputer_of_integers_stays_as_it_is():
    node = "Imputer<imputed_value_int64s=[7], replaced_value_int64=2>(x)"
    model = model_of_inputs(node, "int64[2,3] x", kind="int64")
    check_all_shapes(model, {"x": np.array([[1, 2, 3], [2, 2, 0]])}, 0)


@ORDERS
@pytest.mark.parametrize("kind", ["float", in_sweep("double"), "int64", in_sweep("int32")])
@pytest.mark.parametrize(
    ("shapes", "wanted"),
    [
        (((4, 3), (4, 2)), (3, 2)),  # as they are
        (((4, 3), (4, 2)), (2, 5)),  # cut, and filled up
        (((3,), (2,)), (3, 4)),  # one row
        (((4, 3, 2), (4, 2)), (6, 1)),
        (((4, 0), (4, 2)), (1, 2)),
        (((4, 3),), (1,)),
    ],
)
def test_feature_vectorizer(shapes, wanted, kind, order):
    dtype = DTYPES[kind]
    rng = np.random.default_rng(4)
    feed = {f"x{i}": (5 * rng.standard_normal(s)).astype(dtype) for i, s in enumerate(shapes)}
    inputs = [f"{kind}[{','.join(map(str, x.shape))}] {name}" for name, x in feed.items()]
    node = f"FeatureVectorizer<inputdimensions={list(wanted)}>({', '.join(feed)})"
    check_all_shapes(
        model_of_inputs(node, *inputs), feed, order if np.issubdtype(dtype, np.floating) else 0
    )


def test_feature_vectorizer_must_state_every_width():
    model = model_of_inputs(
        "FeatureVectorizer<inputdimensions=[3]>(a, b)", "float[2,3] a", "float[2,3] b"
    )
    with pytest.raises(NoGradientRule, match=naming("FeatureVectorizer", "each input")):
        onnx_derivative(model)


@ORDERS
@pytest.mark.parametrize("index", [2, in_sweep([1]), [0, 4, 0], in_sweep([[1, 2], [0, 0]])])
@pytest.mark.parametrize("shape", [(5,), (3, 5), in_sweep((2, 3, 5))])
def test_array_feature_extractor(shape, index, order):
    index = np.array(index)
    x = np.random.default_rng(5).standard_normal(shape).astype(np.float32)
    given = [f"{k}[{','.join(map(str, a.shape))}]" for k, a in (("float", x), ("int64", index))]
    model = model_of_inputs("ArrayFeatureExtractor(x, i)", f"{given[0]} x", f"{given[1]} i")
    check_all_shapes(model, {"x": x, "i": index}, order)
    add_initializers(model, {"i": index})
    del model.graph.input[1]
    check_all_shapes(model, {"x": x}, order)


# -- operators without gradient --------------------------------------------------------------------

TREE = """TreeEnsembleRegressor<n_targets=1, nodes_featureids=[0, 0, 0], nodes_treeids=[0, 0, 0],
    nodes_nodeids=[0, 1, 2], nodes_values=[0.0, 0.0, 0.0], nodes_truenodeids=[1, 0, 0],
    nodes_falsenodeids=[2, 0, 0], nodes_modes=["BRANCH_LEQ", "LEAF", "LEAF"], target_ids=[0, 0],
    target_treeids=[0, 0], target_nodeids=[1, 2], target_weights=[-1.0, 2.0]>"""
FLAT = {
    TREE: 1,
    "Binarizer<threshold=0.5>": 3,
    "LabelEncoder<keys_floats=[1.0], values_floats=[5.0], default_float=2.5>": 3,
}


@pytest.mark.parametrize("node", FLAT)
def test_steps_have_no_gradient_but_what_is_beside_them_has(node):
    with pytest.raises(ValueError, match=naming("'x'", "differentiable path")):
        onnx_derivative(ml_model(node))
    model = ml_model(node)
    model.graph.node[0].output[0] = "t"
    beside = onnx.parser.parse_graph(
        f"g (float[N,3] x, float[N,{FLAT[node]}] t, float[{FLAT[node]},2] w) => (float[N,2] y) "
        "{ m = MatMul(t, w)  s = ReduceMean<keepdims=1>(x, a)  y = Mul(m, s) }"
    )
    model.graph.node.extend(beside.node)
    arrays = {"w": np.ones((FLAT[node], 2), np.float32), "a": np.array([1])}
    add_initializers(model, arrays)
    x = np.where(abs(X) < 0.2, 1.3, X)  # off the steps
    report = check_gradient(model, feed={"x": np.where(abs(x - 0.5) < 0.2, 1.5, x)})
    assert report.ok, str(report)
    assert [row.name for row in report.rows] == ["(outputs)", "x", "w"]


@pytest.mark.parametrize(
    "text",
    [
        "(map(int64,float) d) => (float[1,2] y) { y = ai.onnx.ml.DictVectorizer"
        "<int64_vocabulary=[0,1]>(d) }",
        '(map(int64,float) d) => (float[1,2] y) { y = ai.onnx.ml.CastMap<cast_to="TO_FLOAT">(d) }',
        "(float[N,2] x) => (float[N,2] y) { z = ai.onnx.ml.ZipMap<classlabels_int64s=[0,1]>(x) "
        "y = Other(z) }",
    ],
)
def test_maps_are_refused(text):
    with pytest.raises(ModelError, match=naming("maps", "only tensors")):
        onnx_derivative(parse_model(f"g {text}"))


# -- converted from scikit-learn -------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [
        *("svc3", "columns", "trees"),
        *("logistic", "mlp"),
        *map(in_sweep, "svc nusvc svr nusvr one_class linear_svc impute ridge".split()),
    ],
)
def test_scikit_learn(name):
    skl2onnx = pytest.importorskip("skl2onnx")
    from sklearn.compose import ColumnTransformer
    from sklearn.ensemble import RandomForestRegressor, StackingRegressor
    from sklearn.impute import SimpleImputer
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.neural_network import MLPClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import MaxAbsScaler, Normalizer, StandardScaler
    from sklearn.svm import SVC, SVR, LinearSVC, NuSVC, NuSVR, OneClassSVM

    rng = np.random.default_rng(0)
    x = rng.standard_normal((80, 4)).astype(np.float32)
    two, three = x[:, 0] + x[:, 1] ** 2 > 0.7, np.digitize(x[:, 0] + x[:, 1], [-0.5, 0.5])
    columns = [
        ("a", StandardScaler(), [0, 2]),
        ("b", make_pipeline(SimpleImputer(), Normalizer()), [1, 3]),
    ]
    model, y = {
        "svc": (SVC(), two),
        "svc3": (SVC(kernel="poly", coef0=0.5), three),
        "nusvc": (NuSVC(kernel="sigmoid", nu=0.1), three),
        "svr": (SVR(kernel="poly"), x[:, 0]),
        "nusvr": (NuSVR(), x[:, 0]),
        "one_class": (OneClassSVM(), None),
        "linear_svc": (LinearSVC(), three),
        "impute": (make_pipeline(SimpleImputer(), StandardScaler(), LogisticRegression()), two),
        "logistic": (make_pipeline(StandardScaler(), Normalizer(), LogisticRegression()), three),
        "ridge": (make_pipeline(StandardScaler(), Normalizer(), Ridge()), x[:, 0]),
        "mlp": (make_pipeline(StandardScaler(), MLPClassifier((5,), max_iter=20)), three),
        "columns": (make_pipeline(ColumnTransformer(columns), MaxAbsScaler(), SVC()), three),
        "trees": (StackingRegressor([("t", RandomForestRegressor(2)), ("r", Ridge())]), x[:, 0]),
    }[name]
    if name in ("impute", "columns"):
        x[rng.random(x.shape) < 0.1] = np.nan
        x[:, [0, 2]] = np.nan_to_num(x[:, [0, 2]])
    model.fit(x, y)
    options = {"zipmap": False} if hasattr(model, "classes_") and name != "linear_svc" else {}
    made = skl2onnx.to_onnx(model, x[:1], options=options, target_opset={"": 18, "ai.onnx.ml": 3})
    results = (run(m, X=x) for m in (to_proto(prepare(made)), made))
    for found, expected in zip(*results, strict=True):
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, atol=1e-5)
    report = check_gradient(made, feed={"X": x[:7]})
    assert report.rows
    assert all(row.ok for row in report.rows), str(report)
