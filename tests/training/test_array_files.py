"""Files of arrays, which the package `safetensors` reads and writes, too."""

import hashlib
import json

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from onnxgrad.training.array_files import read_arrays, serialize_arrays

KINDS = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64"
ARRAYS = {
    **{kind: np.arange(3).astype(kind) for kind in KINDS.split()},
    "number": np.array(2.5),
    "empty": np.zeros((2, 0), np.float32),
    "columns": np.arange(6, dtype=np.int16).reshape(2, 3).T,
    "every second": np.arange(9.0)[::2],
    "big-endian": np.array([1.5, 2], ">f8"),
    "Gewicht/ä\n": np.ones((1, 2, 1), np.float32),
}


def write(path, arrays, **options):
    path.write_bytes(b"".join(serialize_arrays(arrays, **options)))
    return path


def assert_same(read, arrays):
    assert read.keys() == arrays.keys()
    for name, array in arrays.items():
        assert read[name].dtype == array.dtype.newbyteorder("=")
        np.testing.assert_array_equal(read[name], array)


def test_safetensors_reads_the_files(tmp_path):
    path = write(tmp_path / "a.safetensors", ARRAYS, metadata={"model": "m"})
    assert_same(safetensors.numpy.load_file(path), ARRAYS)
    with safetensors.safe_open(path, framework="np") as file:
        assert file.metadata()["model"] == "m"


def test_the_elements_are_where_safetensors_puts_them(tmp_path):
    """The same tensors stand in the same order, and are aligned."""
    arrays = {n: ARRAYS[n] for n in ("float32", "int8", "float64", "number", "empty")}
    ours = write(tmp_path / "a", arrays).read_bytes()
    theirs = safetensors.numpy.save(arrays)
    size = sum(array.nbytes for array in arrays.values())
    assert ours[-size:] == theirs[-size:]
    assert (len(ours) - size) % 8 == 0


def test_files_of_safetensors_are_read(tmp_path):
    native = {n: np.ascontiguousarray(a).reshape(a.shape) for n, a in ARRAYS.items()}
    native["big-endian"] = native["big-endian"].astype(float)
    safetensors.numpy.save_file(native, tmp_path / "a", metadata={"a": "b"})
    arrays, metadata = read_arrays(tmp_path / "a")
    assert_same(arrays, native)
    assert metadata == {"a": "b"}
    assert all(array.flags.writeable for array in arrays.values())


def test_bfloat16_and_the_digest(tmp_path):
    arrays = {"w": np.array([1, 2.5], ml_dtypes.bfloat16), "n": np.array(3, ml_dtypes.bfloat16)}
    path, digest = write(tmp_path / "a", arrays), hashlib.sha256()
    assert_same(read_arrays(path, digest)[0], arrays)
    assert digest.digest() == hashlib.sha256(path.read_bytes()).digest()


def test_no_arrays(tmp_path):
    assert read_arrays(write(tmp_path / "a", {}))[0] == {}


@pytest.mark.newest  # before 0.7, the package knows no complex numbers
def test_complex_numbers(tmp_path):
    arrays = {"w": np.array([1 + 2j, -3j], np.complex64)}
    path = write(tmp_path / "a", arrays)
    assert_same(safetensors.numpy.load_file(path), arrays)
    safetensors.numpy.save_file(arrays, path)
    assert_same(read_arrays(path)[0], arrays)


def test_text_has_no_place_in_a_file():
    with pytest.raises(TypeError, match=r"'names'.*<U1"):
        list(serialize_arrays({"names": np.array(["a"])}))


@pytest.mark.parametrize("cut", [0, 4, 20, -1, "header", "longer"])
def test_other_files_are_refused(tmp_path, cut):
    path = write(tmp_path / "a", {"w": np.ones(4)})
    data = path.read_bytes()
    if cut == "header":
        path.write_bytes(b"\xff" * 8 + data[8:])
    else:
        path.write_bytes(data + b"\0" if cut == "longer" else data[:cut])
    with pytest.raises(ValueError, match="damaged"):
        read_arrays(path)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F64", "shape": [4], "data_offsets": [0, 16]},
        {"dtype": "F64", "shape": [2], "data_offsets": [8, 24]},
        {"dtype": "F64", "shape": [-1, -2], "data_offsets": [0, 16]},
        {"dtype": "F64", "shape": "ab", "data_offsets": [0, 16]},
        {"dtype": "F4", "shape": [2], "data_offsets": [0, 16]},
        {"dtype": "F64", "shape": [1 << 60], "data_offsets": [0, 1 << 63]},
        {"dtype": "F64"},
        3,
    ],
)
def test_headers_that_do_not_fit_are_refused(tmp_path, entry):
    header = json.dumps({"w": entry}).encode()
    (tmp_path / "a").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(ValueError, match="damaged"):
        read_arrays(tmp_path / "a")
