"""The door: a model as `ModelProto`, bytes or path, whole or broken."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnxgrad import ModelError, add_loss_output, check_gradient, onnx_derivative
from onnxgrad.graph import get_train_initializer, select_model_inputs_outputs
from onnxgrad.model import read as read_module
from tests.support.errors import naming
from tests.support.models import parse_model

DOORS = [
    onnx_derivative,
    add_loss_output,
    get_train_initializer,
    select_model_inputs_outputs,
    check_gradient,
]


def affine_model() -> onnx.ModelProto:
    """Return a matrix and a bias."""
    rng = np.random.default_rng(0)
    weights = {n: np.float32(rng.normal(size=s)) for n, s in (("w", (4, 3)), ("b", (3,)))}
    text = "g (float[N,4] X) => (float[N,3] Y) { h = MatMul(X, w)  Y = Add(h, b) }"
    return parse_model(text, **weights)


@pytest.mark.parametrize("door", DOORS)
def test_a_model_is_a_proto_bytes_or_a_path(tmp_path, door):
    path, model = tmp_path / "m.onnx", affine_model()
    onnx.save(model, path)
    before = model.SerializeToString()
    expected = str(door(model))
    for given in (path, str(path), path.read_bytes(), bytearray(path.read_bytes())):
        assert str(door(given)) == expected
    assert model.SerializeToString() == before


@pytest.mark.parametrize("door", DOORS)
def test_other_objects_and_missing_files(tmp_path, door):
    with pytest.raises(TypeError, match=naming("ModelProto", "bytes", "path", "not int")):
        door(3)
    with pytest.raises(ModelError, match=naming("none.onnx", "No such", "name a")):
        door(tmp_path / "none.onnx")
    with pytest.raises(ModelError, match=naming(str(tmp_path), "directory")):
        door(tmp_path)


@pytest.mark.parametrize(
    ("library", "name", "way"),
    [("torch.nn.modules", "Linear", "torch.onnx.export"), ("sklearn.svm", "SVC", "skl2onnx")],
)
def test_objects_of_other_libraries(library, name, way):
    other = type(name, (), {"__module__": library})
    with pytest.raises(TypeError, match=naming(name, way)):
        onnx_derivative(other())


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"not a model at all", naming("m.onnx'", "18 bytes", "truncated")),
        (b"", naming("m.onnx'", "no graph", "export the model again")),
        (affine_model().SerializeToString()[:-30], naming("m.onnx'", " bytes", "truncated")),
        (onnx.ModelProto(ir_version=8).SerializeToString(), naming("m.onnx'", "no graph")),
        (
            onnx.ModelProto(graph=affine_model().graph).SerializeToString(),
            naming("m.onnx'", "no opset", "export the model again"),
        ),
    ],
)
def test_bad_files(tmp_path, content, message, door):
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=message):
        door(path)


def test_no_part_of_a_file_is_taken_for_a_model():
    content = affine_model().SerializeToString()
    for length in range(len(content)):
        with pytest.raises(ModelError):
            get_train_initializer(content[:length])


def test_external_data(tmp_path):
    path = tmp_path / "m.onnx"
    onnx.save(affine_model(), path, save_as_external_data=True, size_threshold=0, location="m.data")
    assert onnx_derivative(path) == onnx_derivative(affine_model())
    (tmp_path / "m.data").unlink()
    with pytest.raises(ModelError, match=naming("'m.data'", "not in", "beside the")):
        onnx_derivative(path)
    with pytest.raises(ModelError, match=naming("path of", ".onnx")):
        onnx_derivative(path.read_bytes())
    (tmp_path / "m.data").write_bytes(b"short")
    with pytest.raises(ModelError, match=naming("'m.data'", "truncated", "5 bytes", "copy the")):
        onnx_derivative(path)


@pytest.mark.parametrize("place", ["constant", "branch"])
def test_external_data_of_other_tensors(tmp_path, place):
    text = """g (float[N,2] x, bool c) => (float[N,2] y) {
        k = Constant<value = float[2] {2.0, 3.0}>()
        w = If (c) <then_branch = a () => (float[2] t) { t = Identity(v) },
                    else_branch = b () => (float[2] e) { e = Identity(k) }>
        y = Add(x, k) }"""
    model = parse_model(text)
    branch = model.graph.node[1].attribute[0].g
    branch.initializer.append(numpy_helper.from_array(np.float32([4, 5]), "v"))
    name, tensor = {
        "constant": ("k", model.graph.node[0].attribute[0].t),
        "branch": ("v", branch.initializer[0]),
    }[place]
    tensor.CopyFrom(onnx.TensorProto(name=tensor.name, data_type=1, dims=[2], data_location=1))
    for key, value in {"location": "m.data", "offset": "0", "length": "8"}.items():
        tensor.external_data.add(key=key, value=value)
    path = tmp_path / "m.onnx"
    onnx.save(model, path)
    (tmp_path / "m.data").write_bytes(np.float32([6, 7]).tobytes())
    assert get_train_initializer(path)[name][0].tolist() == [6, 7]
    (tmp_path / "m.data").unlink()
    with pytest.raises(ModelError, match=naming(f"'{name}'", "'m.data'")):
        onnx_derivative(path)
    with pytest.raises(ModelError, match=naming(f"'{name}'", "'m.data'")):
        onnx_derivative(model)


# -- large files, which are read one initializer at a time -----------------------------------------


def model_with_all_fields() -> onnx.ModelProto:
    """Return a model with initializers in several fields, functions and metadata."""
    model = parse_model(
        """<ir_version: 9, opset_import: ["": 20, "own": 1], producer_name: "who", metadata_props:
            ["a": "b"]>
        f (float[N,4] x) => (float[N,4] y) { a = own.twice(x) z = Mul(a, w) y = Add(z, s) }
        <domain: "own", opset_import: ["": 20]> twice (a) => (b) { b = Add(a, a) }""",
        w=np.arange(4, dtype=np.float32),
    )
    stored = onnx.helper.make_tensor("s", onnx.TensorProto.FLOAT, [4], [1, 2, 3, 4])  # float_data
    model.graph.initializer.append(stored)
    model.graph.initializer.append(
        onnx.helper.make_tensor("t", onnx.TensorProto.STRING, [1], ["é"])
    )
    model.graph.doc_string = "a text behind the initializers"
    return model


@pytest.fixture
def all_files_are_large(monkeypatch):
    monkeypatch.setattr(read_module, "LARGE_FILE", 0)


def test_a_large_file_is_read_as_a_small_one(tmp_path, all_files_are_large):
    model, path = model_with_all_fields(), tmp_path / "m.onnx"
    onnx.save(model, path)
    assert read_module.read(path) == model
    model = affine_model()
    onnx.save(model, path, save_as_external_data=True, size_threshold=0)
    found = [numpy_helper.to_array(t) for t in read_module.read(path).graph.initializer]
    for tensor, array in zip(affine_model().graph.initializer, found, strict=True):
        np.testing.assert_array_equal(array, numpy_helper.to_array(tensor))


def test_fields_in_another_order_or_in_parts(tmp_path, all_files_are_large):
    """A message may be written in parts, which are merged: then it is parsed as a whole."""
    model, path = model_with_all_fields(), tmp_path / "m.onnx"
    graph, rest = onnx.ModelProto(graph=model.graph), onnx.ModelProto()
    rest.CopyFrom(model)
    rest.ClearField("graph")
    first, second = onnx.ModelProto(), onnx.ModelProto()
    first.graph.node.extend(model.graph.node)
    second.CopyFrom(graph)
    second.graph.ClearField("node")
    for parts in ((graph, rest), (first, rest, second)):
        path.write_bytes(b"".join(part.SerializeToString() for part in parts))
        assert read_module.read(path) == model


def test_broken_large_files(tmp_path, all_files_are_large):
    path, data = tmp_path / "m.onnx", affine_model().SerializeToString()
    for broken in (b"not a model at all", data[:-30], data[:40], b"\x3b" + data):
        path.write_bytes(broken)
        with pytest.raises(
            ModelError, match=naming("m.onnx'", f"{len(broken)} bytes", "truncated")
        ):
            read_module.read(path)
    with pytest.raises(ModelError, match=naming("No such", "none.onnx")):
        read_module.read(tmp_path / "none.onnx")
