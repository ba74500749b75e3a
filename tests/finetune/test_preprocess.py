"""`preprocess`: models that take raw images, against Pillow and `image_folder`."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import onnxgrad as og
from onnxgrad.training.parameters.choice import default_weights
from tests.support.errors import naming
from tests.support.models import parse_model
from tests.support.running import in_sweep, run, session_of
from tests.support.small_models import float32_model

Image = pytest.importorskip("PIL.Image")
LEVEL = 1 / 255
IMAGENET = og.data.normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])


def unchanged_input(shape: str, dtype: str = "float", opset: int = 18) -> onnx.ModelProto:
    """Return a model that returns its input: what the preprocessing feeds."""
    text = f"g ({dtype}[{shape}] x) => ({dtype}[{shape}] y) {{ y = Identity(x) }}"
    return parse_model(text, opset=opset, ir_version=8)


def random_image(height: int, width: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), np.uint8)


def beside(image: np.ndarray, transforms, size, tmp_path, layout="NCHW") -> np.ndarray:
    """Return what `image_folder` feeds a model in an evaluation."""
    (tmp_path / "a").mkdir(exist_ok=True)
    pixels = image[..., 0] if image.shape[-1] == 1 else image
    Image.fromarray(pixels).save(tmp_path / "a" / "0.png")
    reader = og.data.image_folder(tmp_path, size, transforms, layout, image.shape[-1])
    return reader.take(np.array([0]), None)[0]


@pytest.mark.parametrize(
    "transforms",
    [
        [],
        [og.data.resize(32)],
        [og.data.resize(40), og.data.center_crop(32)],
        [og.data.resize((36, 44)), og.data.center_crop((30, 32))],
        [og.data.center_crop((24, 40))],
        [og.data.center_crop(60), og.data.resize((32, 32))],
        [og.data.resize(40), og.data.random_crop(32), og.data.random_flip(1.0)],
        [og.data.resize(10)],
    ],
    ids=lambda transforms: "-".join(map(str, transforms)),
)
def test_equals_image_folder(transforms, tmp_path):
    """The largest difference is one level of 255, in less than a fifth of the values."""
    model = session_of(og.graph.preprocess(unchanged_input("N,3,32,32"), transforms))
    passes = (
        sum(not isinstance(t, type(og.data.center_crop(1))) for t in transforms) + 2
    )  # resizings
    for shape in [(50, 37), (37, 50), (20, 90), (300, 400), (25, 19), (32, 32)]:
        image = random_image(*shape)
        want = beside(image, transforms, 32, tmp_path)
        (got,) = model.run(None, {"image": image[None]})
        assert got.dtype == np.float32
        difference = np.abs(got - want)
        assert difference.max() < (1 + 1e-4) * LEVEL * passes
        assert np.mean(difference > 1e-6) < 0.25 * passes


def test_one_resize_differs_by_one_level_at_most(tmp_path):
    worst, share = 0.0, []
    for seed, (old, new) in enumerate(
        [
            ((480, 640), (256, 341)),
            ((480, 640), (100, 37)),
            ((20, 30), (45, 67)),
            ((300, 20), (50, 40)),
        ]
    ):
        image = random_image(*old, seed=seed)
        resized = Image.fromarray(image).resize(new[::-1], Image.Resampling.BILINEAR)
        (got,) = run(
            og.graph.preprocess(unchanged_input("N,a,b,3", "uint8"), [og.data.resize(new)]),
            image=image[None],
        )
        difference = np.abs(got[0].astype(int) - np.asarray(resized))
        worst, share = max(worst, difference.max()), [*share, np.mean(difference > 0)]
    assert worst <= 1
    assert np.median(share) < 0.05


@pytest.mark.parametrize("side", [5, 33, *map(in_sweep, [7, 31, 224])])
def test_sizes_that_are_computed_are_those_of_pillow(side):
    """Half of a pixel is rounded to even, in float64."""
    model = session_of(og.graph.preprocess(unchanged_input("N,3,a,b"), [og.data.resize(side)]))
    for shape in [(10, 15), (15, 10), (14, 49), (101, 333), (2, 301), (3, 3)]:
        image = Image.fromarray(random_image(*shape))
        (got,) = model.run(None, {"image": np.asarray(image)[None]})
        assert got.shape[2:] == og.data.resize(side)(image, None).size[::-1]


def test_normalized_images_of_a_batch(tmp_path):
    images = np.stack([random_image(50, 60, seed=i) for i in range(3)])
    transforms = [og.data.resize(40), og.data.center_crop(32), IMAGENET]
    (got,) = run(og.graph.preprocess(unchanged_input("N,3,32,32"), transforms), image=images)
    for image, one in zip(images, got, strict=True):
        want = beside(image, transforms, 32, tmp_path)[0]
        assert np.abs(one - want).max() < 1.001 * LEVEL / 0.224
    gray = og.data.normalize([0.5], [0.25])
    want = (images[:, 9:41, 14:46] / np.float32(255) - np.float32(0.5)) / np.float32(0.25)
    (got,) = run(
        og.graph.preprocess(unchanged_input("N,3,32,32"), [og.data.center_crop(32), gray]),
        image=images,
    )
    np.testing.assert_array_equal(got, np.moveaxis(want, -1, 1))


@pytest.mark.parametrize(
    ("shape", "dtype", "options"),
    [
        ("N,32,32,3", "float", {}),
        ("1,32,32,3", "float", {}),
        ("N,32,32,1", "float", {}),
        ("N,3,32,32", "float16", {}),
        ("N,3,32,32", "double", {}),
        ("N,32,32,3", "uint8", {}),
        ("N,h,w,c", "float", {"layout": "NHWC", "size": 32}),
        ("N,c,h,w", "float", {"layout": "NCHW", "size": (32, 32)}),
        ("N,3,height,width", "float", {"size": 32}),
    ],
)
def test_the_input_of_the_model(shape, dtype, options, tmp_path):
    dims = shape.split(",")
    nhwc = options.get("layout", "NHWC" if dims[3] in "134" else "NCHW") == "NHWC"
    count = dims[3 if nhwc else 1]
    image = random_image(40, 50, int(count) if count.isdigit() else 3)
    model = og.graph.preprocess(unchanged_input(shape, dtype), [], **options)
    onnx.checker.check_model(model, full_check=True)
    (got,) = run(model, image=image[None])
    want = beside(image, [], 32, tmp_path, "NHWC" if nhwc else "NCHW")
    if dtype == "uint8":
        want = np.rint(want * 255)
    assert got.dtype == {"float": np.float32, "double": np.float64}.get(dtype, dtype)
    assert np.abs(got - want).max() < (1.001 if dtype == "uint8" else 1.1 * LEVEL)


def test_a_reader_is_a_description(tmp_path):
    want = beside(random_image(40, 50), [og.data.resize(30), IMAGENET], (24, 28), tmp_path, "NHWC")
    reader = og.data.image_folder(
        tmp_path, (24, 28), [og.data.resize(30), og.data.random_flip(), IMAGENET], "NHWC"
    )
    (got,) = run(
        og.graph.preprocess(unchanged_input("N,a,b,3"), reader), image=random_image(40, 50)[None]
    )
    assert np.abs(got - want).max() < 2.001 * LEVEL / 0.224


@pytest.mark.parametrize("opset", [9, 12, 17])
def test_opsets_below_18_are_raised(opset):
    text = """g (float[N,3,8,8] x) => (float[N,3,4,4] y) {
        p = MaxPool<kernel_shape=[2,2],strides=[2,2]>(x)  y = Softmax<axis=1>(p) }"""
    model = parse_model(text, opset=opset, ir_version=4)
    image = random_image(8, 8)
    raw = og.graph.preprocess(model, [], name="pixels")
    onnx.checker.check_model(raw, full_check=True)
    feed = np.moveaxis(image[None] / np.float32(255), -1, 1)
    np.testing.assert_allclose(run(raw, pixels=image[None])[0], run(model, x=feed)[0], rtol=1e-6)


@pytest.mark.parametrize("opset", [18, 19, 21, 23])
def test_newer_opsets_are_kept(opset):
    raw = og.graph.preprocess(
        unchanged_input("N,3,16,16", opset=opset), [og.data.resize(20), IMAGENET]
    )
    assert raw.opset_import[0].version == opset
    onnx.checker.check_model(raw, full_check=True)
    assert run(raw, image=random_image(30, 22)[None])[0].shape == (1, 3, 16, 16)


def test_names_of_the_model_are_kept():
    """Other inputs, subgraphs that capture the input, and names like those of the new nodes."""
    text = """g (float[N,3,height,5] image, bool c) => (float[N,3,height,5] y, float[2] taken)
        { y = If<then_branch = t () => (float[N,3,height,5] a) { a = Mul(image, const) },
                 else_branch = e () => (float[N,3,height,5] b) { b = Identity(image) }>(c)
          taken = Identity(pair) }"""
    model = float32_model(text, const=np.float32(2), pair=np.float32([1, 2]))
    model.graph.output[1].name = model.graph.node[1].output[0] = "preprocess.const"
    before = model.SerializeToString()
    raw = og.graph.preprocess(model, [og.data.normalize([0, 0, 0], [0.5] * 3)], input="image")
    assert model.SerializeToString() == before
    onnx.checker.check_model(raw, full_check=True)
    assert [x.name for x in raw.graph.input] == ["image_1", "c"]
    assert raw.graph.input[0].type.tensor_type.shape.dim[1].dim_param == "height_1"
    image = random_image(4, 5)
    for c in (True, False):
        y, pair = run(raw, image_1=image[None], c=np.array(c))
        want = np.moveaxis(image[None] / np.float32(255), -1, 1) * (4 if c else 2)
        np.testing.assert_allclose(y, want, rtol=1e-6)
        np.testing.assert_array_equal(pair, [1, 2])


def normalizing_classifier() -> onnx.ModelProto:
    """Return a small classifier with its own normalization of the input."""
    rng = np.random.default_rng(0)
    text = """g (float[N,3,16,16] x) => (float[N,3] y)
        { s = Sub(x, mean)  d = Div(s, deviation)  c = Conv(d, w, b)  r = Relu(c)
          p = GlobalAveragePool(r)  f = Flatten(p)  y = Gemm(f, head, bias) }"""
    weights = {"w": rng.normal(size=(4, 3, 3, 3)) / 5, "b": np.zeros(4)}
    weights |= {"head": rng.normal(size=(4, 3)), "bias": np.zeros(3)}
    scaling = {"mean": rng.random((3, 1, 1)), "deviation": rng.random((3, 1, 1)) + 0.5}
    return float32_model(text, **weights, **scaling)


def test_a_model_with_preprocessing_trains_as_beside(tmp_path):
    """Same weights train, and they become those of a model that is fed by hand."""
    transforms = [og.data.resize(20), og.data.center_crop(16), IMAGENET]
    raw = og.graph.preprocess(normalizing_classifier(), transforms)
    assert (
        default_weights(raw)
        == default_weights(normalizing_classifier())
        == ["w", "b", "head", "bias"]
    )
    untrained = {t.name: t.why for t in og.trainable(raw) if not t.trains}
    assert {"mean", "deviation"} < untrained.keys()
    assert all("before any" in why for why in untrained.values()), untrained
    images = np.stack([random_image(30, 40, seed=i) for i in range(24)])
    front = session_of(og.graph.preprocess(unchanged_input("N,3,16,16"), transforms))
    fed = front.run(None, {"image": images})[0]
    labels = np.arange(24) % 3
    a, b = (
        og.Trainer(model, "cross_entropy", learning_rate=0.01).fit(
            x, labels, epochs=2, batch_size=8
        )
        for model, x in ((raw, images), (normalizing_classifier(), fed))
    )
    for name, weight in b.state.weights.items():
        np.testing.assert_allclose(a.state.weights[name], weight, rtol=1e-4, atol=1e-5)
        old = onnx.numpy_helper.to_array(next(t for t in raw.graph.initializer if t.name == name))
        assert np.abs(weight - old).max() > 1e-3
    structure = [(n.op_type, list(n.input)) for n in a.model.graph.node]
    assert structure == [(n.op_type, list(n.input)) for n in raw.graph.node]


def test_refused_preprocessing():
    square, mel = "N,3,8,8", og.data.mel_spectrogram(8000, 256, 80, 20)
    frames = og.data.mel_spectrogram(8000, 256, 80, 20, frames_first=True)
    for shape, transforms, options, named in (
        (square, [IMAGENET, og.data.resize(3)], {}, ["normalize", "last"]),
        (square, [og.data.normalize([0, 0], [1, 1])], {}, ["3 channels"]),
        (square, [lambda image, rng: image], {}, ["no nodes", "write(op, x)"]),
        (square, [og.data.resize(8), og.data.resample(2, 1)], {}, ["Resize(size=8)", "images"]),
        (square, [], {"size": 9}, ["size=9", "'x'", "(8, 8)"]),
        ("N,a,b,c", [], {}, ["preprocess(..., layout='NCHW')"]),
        ("N,8", [], {}, ["2 axes", "images have 4"]),
        ("N,4,8,8", [], {}, ["alpha channel"]),
        (square, [], {"input": "z"}, ["input 'z'"]),
        (square, [], {"name": "y"}, ["name='y'", "choose another"]),
        (square, [og.data.resize(8)], {"dtype": "int16"}, ["for images", "dtype="]),
        ("N,T", [og.data.resample(2, 1)], {"size": 3}, ["size", "for images", "leave out"]),
        ("N,9,T", [mel], {}, [", 20, ?)", "'x' takes (N, 9, T)"]),
        ("N,T,20", [mel], {}, ["frames_first=True"]),
        ("N,1,20,T", [frames], {}, ["frames_first=False"]),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=naming(*named)):
            og.graph.preprocess(unchanged_input(shape), transforms, **options)
    with pytest.raises(ValueError, match=naming("'x'", "uint8", "leave out")):
        og.graph.preprocess(unchanged_input("N,8,8,3", "uint8"), [IMAGENET])
    with pytest.raises(ValueError, match=naming("'x'", "no floats", "choose another")):
        og.graph.preprocess(unchanged_input(square, "int64"), [])
