"""Operators of `ai.onnx.ml`: what they are lowered to computes what onnxruntime computes."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from onnxgrad import NoGradientRule, check_gradient, onnx_derivative
from onnxgrad.graph.prepare import prepare, to_proto

RNG = np.random.default_rng(0)
X = RNG.standard_normal((6, 3)).astype(np.float32)
FLOATS = ", ".join(f"{v:.3f}" for v in RNG.standard_normal(12))


def parse(node: str, kind: str = "float", label: str = "") -> onnx.ModelProto:
    outputs = f"{label}[N] k, float[N,M] y" if label else "float[N,M] y"
    results = "k, y" if label else "y"
    return onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["ai.onnx.ml": 3, "": 18]>
        g ({kind}[N,3] x) => ({outputs}) {{ {results} = ai.onnx.ml.{node}(x) }}""")


def run(model: onnx.ModelProto, x: np.ndarray) -> list:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})


def same(model: onnx.ModelProto, x: np.ndarray = X) -> None:
    lowered = to_proto(prepare(model))
    assert all(node.domain != "ai.onnx.ml" for node in lowered.graph.node)
    for found, expected in zip(run(lowered, x), run(model, x), strict=True):
        if expected.dtype.kind == "f":
            np.testing.assert_allclose(found, expected, rtol=2e-6, atol=2e-7)
        else:
            np.testing.assert_array_equal(found, expected)
        assert found.shape == expected.shape


REGRESSORS = {
    "one target": "LinearRegressor<coefficients=[0.5, -1.0, 2.0], intercepts=[0.3]>",
    "no intercept": "LinearRegressor<coefficients=[0.5, -1.0, 2.0]>",
    "four": f"LinearRegressor<coefficients=[{FLOATS}], intercepts=[1.0,2.0,3.0,4.0], targets=4>",
}
for post in ("NONE", "LOGISTIC", "SOFTMAX"):
    REGRESSORS[post] = (
        f'LinearRegressor<coefficients=[{FLOATS}], targets=4, post_transform="{post}">'
    )


@pytest.mark.parametrize("node", REGRESSORS.values(), ids=REGRESSORS)
def test_linear_regressor(node):
    same(parse(node))
    report = check_gradient(parse(node), feed={"x": X})
    assert report.ok, str(report)


CLASSIFIERS = {}
for classes, rows in ((2, 1), (2, 2), (3, 3), (4, 4)):
    coefficients = ", ".join(f"{v:.3f}" for v in RNG.standard_normal(3 * rows))
    intercepts = ", ".join(f"{v:.3f}" for v in RNG.standard_normal(rows))
    for labels in ("ints", "strings"):
        names = [f'"c{i}"' if labels == "strings" else str(7 - i) for i in range(classes)]
        for post in ("NONE", "LOGISTIC", "SOFTMAX"):
            CLASSIFIERS[f"{classes} {rows} {labels} {post}"] = (
                f"LinearClassifier<coefficients=[{coefficients}], intercepts=[{intercepts}], "
                f'classlabels_{labels}=[{", ".join(names)}], post_transform="{post}">',
                "int64" if labels == "ints" else "string",
            )


@pytest.mark.parametrize("case", CLASSIFIERS)
def test_linear_classifier(case):
    node, label = CLASSIFIERS[case]
    same(parse(node, label=label))
    same(parse(node, label=label), np.zeros((2, 3), np.float32))
    if label == "int64":
        report = check_gradient(parse(node, label=label), feed={"x": X})
        assert report.ok, str(report)


@pytest.mark.parametrize("post", ["SOFTMAX_ZERO", "PROBIT"])
def test_other_post_transforms_are_refused(post):
    node = f'LinearRegressor<coefficients=[{FLOATS}], targets=4, post_transform="{post}">'
    with pytest.raises(NoGradientRule, match=f"post_transform '{post}' has no gradient"):
        onnx_derivative(parse(node))


@pytest.mark.parametrize(
    "options", ["offset=[1.0, 2.0, 3.0], scale=[0.5, 2.0, -1.0]", "offset=[1.0], scale=[0.5]"]
)
def test_scaler(options):
    model = parse(f"Scaler<{options}>")
    same(model)
    report = check_gradient(model, weights=["y.offset", "y.scale"], feed={"x": X})
    assert report.ok, str(report)
    assert len(report.rows) == 4


@pytest.mark.parametrize("kind", ["double", "int64", "int32"])
@pytest.mark.parametrize("name", ["Scaler", "Normalizer", "LinearClassifier"])
def test_other_inputs(name, kind):
    dtype = {"double": np.float64, "int64": np.int64, "int32": np.int32}[kind]
    classifier, label = CLASSIFIERS["3 3 ints SOFTMAX"]
    node = {
        "Scaler": "Scaler<offset=[1.0, 2.0, 3.0], scale=[0.5, 2.0, -1.0]>",
        "Normalizer": 'Normalizer<norm="L2">',
        "LinearClassifier": classifier,
    }[name]
    label = label if name == "LinearClassifier" else ""
    same(parse(node, kind, label), (10 * X).astype(dtype))


@pytest.mark.parametrize("norm", ["MAX", "L1", "L2"])
def test_normalizer(norm):
    model = parse(f'Normalizer<norm="{norm}">')
    rows = np.vstack([X, -abs(X), np.zeros((1, 3))]).astype(np.float32)
    same(model, rows)
    report = check_gradient(model, feed={"x": rows[:-1]})
    assert report.ok, str(report)
    made = onnx_derivative(model)
    session = ort.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    [gradient] = session.run(None, {"x": rows, "y_grad": np.ones_like(rows)})
    assert np.isfinite(gradient).all()


# -- where onnxruntime leaves the specification --------------------------------------------------


@pytest.mark.parametrize("post", ["NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO"])
def test_one_score_is_handed_on_as_it_is(post):
    same(parse(f'LinearRegressor<coefficients=[0.5, -1.0, 2.0], post_transform="{post}">'))
    node = f"""LinearClassifier<coefficients=[0.5, -1.0, 2.0], intercepts=[0.3],
        post_transform="{post}">"""
    same(parse(node, label="int64"))  # without class labels, they are 0 and 1
    pair = node.replace("intercepts", "classlabels_ints=[3, 4], intercepts")
    same(parse(pair, label="int64"))
    assert check_gradient(parse(pair, label="int64"), feed={"x": X}).ok


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_of_equal_scores_the_first_wins(rows):
    """And a single score of zero is that of the first of two classes."""
    zeros = ", ".join(["0.0"] * 3 * rows)
    node = f"""LinearClassifier<coefficients=[{zeros}], intercepts=[{", ".join(["0.0"] * rows)}],
        classlabels_ints=[{"7, 5" if rows < 3 else "7, 5, 9"}]>"""
    same(parse(node, label="int64"))


def test_probit_of_one_score_is_refused():
    options = 'coefficients=[0.5, -1.0, 2.0], intercepts=[0.3], post_transform="PROBIT"'
    classifier = f"LinearClassifier<classlabels_ints=[3, 4], {options}>"
    for node, label in ((f"LinearRegressor<{options}>", ""), (classifier, "int64")):
        with pytest.raises(NoGradientRule, match="post_transform 'PROBIT' has no gradient"):
            onnx_derivative(parse(node, label=label))


@pytest.mark.parametrize("targets", [1, 2])
@pytest.mark.parametrize("intercepts", [1, 2, 3])
def test_intercepts_of_another_number_are_not_read(targets, intercepts):
    coefficients = ", ".join(FLOATS.split(", ")[: 3 * targets])
    values = ", ".join("1.5 2.5 3.5".split()[:intercepts])
    node = f"LinearRegressor<coefficients=[{coefficients}], targets={targets}"
    model = parse(f"{node}, intercepts=[{values}]>")
    same(model)
    assert ("y.intercepts_grad" in [y.name for y in onnx_derivative(model).graph.output]) == (
        targets == intercepts
    )


def test_more_classes_than_scores():
    for post in ("NONE", "LOGISTIC", "SOFTMAX"):
        node = f"""LinearClassifier<coefficients=[{", ".join(FLOATS.split(", ")[:6])}],
            intercepts=[0.1, 0.2], classlabels_strings=["a", "b", "c"], post_transform="{post}">"""
        same(parse(node, label="string"))


@pytest.mark.parametrize("name", ["Scaler", "Normalizer", "LinearRegressor", "LinearClassifier"])
def test_a_vector_is_one_row(name):
    node, label = {
        "Scaler": ("Scaler<offset=[1.0, 2.0, 3.0], scale=[0.5, 2.0, -1.0]>", ""),
        "Normalizer": ('Normalizer<norm="L1">', ""),
        "LinearRegressor": (REGRESSORS["four"], ""),
        "LinearClassifier": CLASSIFIERS["3 3 ints SOFTMAX"],
    }[name]
    model = parse(node, label=label)
    del model.graph.input[0].type.tensor_type.shape.dim[0]
    for y in model.graph.output:
        y.type.tensor_type.ClearField("shape")
    same(model, X[0])


def test_scaler_of_doubles_subtracts_before_it_rounds():
    model = parse("Scaler<offset=[1000000000.0], scale=[1.0]>", "double")
    same(model, X.astype(np.float64) + 1e9)


def test_a_row_of_norm_zero_stays_as_it_is():
    g = np.float32([[1, 2, 3]])
    for norm in ("MAX", "L1", "L2"):
        model = parse(f'Normalizer<norm="{norm}">')
        same(model, np.float32([[1e-30, 0, 0], [-1e-38, 1e-38, 0], [-1, 0, -1]]))
        made = onnx_derivative(model).SerializeToString()
        session = ort.InferenceSession(made, providers=["CPUExecutionProvider"])
        [found] = session.run(None, {"x": 0 * g, "y_grad": g})
        np.testing.assert_array_equal(found, g)
