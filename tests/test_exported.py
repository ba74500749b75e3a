"""Models as torch and scikit-learn export them."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnxgrad import add_loss_output, check_gradient, onnx_derivative, select_model_inputs_outputs
from running import run_named


def inputs(model: onnx.ModelProto) -> list[str]:
    return [x.name for x in model.graph.input]


def weights(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}


@pytest.mark.filterwarnings("ignore")  # exported in training mode
def test_exported_transformer_encoder_as_torch(tmp_path):
    torch = pytest.importorskip("torch")
    pytest.importorskip("onnxscript")

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(11, 8)
            layer = torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, "gelu", batch_first=True)
            self.encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = torch.nn.Linear(8, 3)

        def forward(self, ids):
            return self.head(self.encoder(self.embed(ids)).mean(1))

    torch.manual_seed(0)
    net = Net().train()
    for p in net.parameters():  # the layers start as copies, which the exporter shares
        torch.nn.init.normal_(p, std=0.3)
    sizes = {0: torch.export.Dim("N"), 1: torch.export.Dim("T")}
    program = torch.onnx.export(
        net,
        (torch.ones(2, 5, dtype=torch.int64),),
        dynamic_shapes=(sizes,),
        dynamo=True,
        verbose=False,
    )
    model = program.model_proto
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 11, (4, 7))
    g = rng.standard_normal((4, 3)).astype(np.float32)
    net(torch.tensor(ids)).backward(torch.tensor(g))
    parameters = dict(net.named_parameters())
    names = [n for n in weights(model) if n in parameters]
    assert len(names) > 8  # the others are stored transposed, under other names
    report = check_gradient(model, feed={model.graph.input[0].name: ids})
    assert report.ok, str(report)
    assert len(report.rows) > 24
    made = onnx_derivative(model, names, [])
    [data, *rest] = inputs(made)
    found = run_named(made, {data: ids, rest[-1]: g, **{n: weights(model)[n] for n in names}})
    for name in names:
        expected = parameters[name].grad.numpy()
        scale = max(abs(expected).max(), 1e-3)
        np.testing.assert_allclose(
            found[f"{name}_grad"] / scale, expected / scale, atol=2e-5, err_msg=name
        )


@pytest.mark.filterwarnings("ignore")  # not converged
@pytest.mark.parametrize("kind", ["logistic", "ridge", "mlp"])
def test_scikit_learn_pipelines(kind):
    skl2onnx = pytest.importorskip("skl2onnx")
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.neural_network import MLPClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import Normalizer, StandardScaler

    rng = np.random.default_rng(0)
    x = rng.standard_normal((60, 4)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64) + (x[:, 1] > 1)
    last = {
        "logistic": LogisticRegression(),
        "ridge": Ridge(),
        "mlp": MLPClassifier((5,), max_iter=20),
    }[kind]
    pipeline = make_pipeline(StandardScaler(), Normalizer(), last)
    with np.errstate(all="ignore"):
        pipeline.fit(x, y)
    options = {} if kind == "ridge" else {"options": {id(last): {"zipmap": False}}}
    model = skl2onnx.to_onnx(pipeline, x[:1], target_opset={"": 18, "ai.onnx.ml": 3}, **options)
    output = model.graph.output[-1].name
    model = select_model_inputs_outputs(model, [output])
    report = check_gradient(model, feed={"X": x[:5]})
    assert report.ok, str(report)
    assert len(report.rows) > 2


def test_zipmap_names_the_tensor_to_use():
    skl2onnx = pytest.importorskip("skl2onnx")
    from sklearn.linear_model import LogisticRegression

    x = np.random.default_rng(0).standard_normal((30, 2)).astype(np.float32)
    made = LogisticRegression().fit(x, x[:, 0] > 0)
    model = skl2onnx.to_onnx(made, x[:1], target_opset=18)
    with pytest.raises(
        ValueError, match="'output_probability' is no tensor: select 'probabilities'"
    ):
        onnx_derivative(model)


def test_the_loss_of_a_zipmap_names_the_tensor_to_use():
    skl2onnx = pytest.importorskip("skl2onnx")
    from sklearn.linear_model import LogisticRegression

    x = np.random.default_rng(0).standard_normal((30, 2)).astype(np.float32)
    model = skl2onnx.to_onnx(LogisticRegression().fit(x, x[:, 0] > 0), x[:1], target_opset=18)
    with pytest.raises(ValueError, match=r"0 float outputs: .* one of 'probabilities'$"):
        add_loss_output(model, "log")
    with pytest.raises(ValueError, match="output_index='probabilities'"):
        add_loss_output(model, "log", output_index="output_probability")
    made = add_loss_output(model, "log", output_index="probabilities")
    assert [y.name for y in made.graph.output] == ["loss", "probabilities"]
