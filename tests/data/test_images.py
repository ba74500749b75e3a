"""Folders of images: decoded while training reads them, transformed by seed."""

import sys

import numpy as np
import pytest

from onnxgrad import Trainer, add_loss_output
from onnxgrad.compat import OrtGradientOptimizer
from onnxgrad.data import image_transforms
from onnxgrad.data.images import image_folder
from onnxgrad.graph import preprocess
from onnxgrad.training.data import Dataset
from onnxgrad.training.fields import DataSpec
from tests.support.errors import naming
from tests.support.small_models import float32_model
from tests.support.trainings import objective_with_loss

Image = pytest.importorskip("PIL.Image")
COLORS = {"blue": (0, 0, 255), "green": (0, 255, 0), "red": (255, 0, 0)}


def color_classifier(shape="N,3,6,8", perm=None):
    """Return a classifier of three classes by the mean color."""
    move = f"m = Transpose<perm=[{perm}]>(x)" if perm else "m = Identity(x)"
    text = f"""g (float[{shape}] x) => (float[N,3] y)
        {{ {move}  p = ReduceMean<keepdims=0>(m, axes)  y = MatMul(p, w) }}"""
    made = float32_model(text, w=np.zeros((3, 3)), axes=np.array([2, 3]))
    return add_loss_output(made, "cross_entropy")


@pytest.fixture
def folder_of_colors(tmp_path):
    """Return a folder of 3 x 4 images of 10 x 12 pixels; the darkness tells them apart."""
    for name, color in COLORS.items():
        (tmp_path / name / "deep").mkdir(parents=True)
        for i in range(4):
            shade = tuple(c * (10 - i) // 10 for c in color)
            inner = "deep/" * (i == 3)
            Image.new("RGB", (12, 10), shade).save(tmp_path / name / f"{inner}{i}.png")
        (tmp_path / name / "notes.txt").write_text("no image")
    (tmp_path / ".hidden").mkdir()
    return tmp_path


def source(reader, made=None, size=5):
    return Dataset(reader).source(
        DataSpec(objective_with_loss(made or color_classifier(), ["w"], row_weight="")), size
    )


def batches_of_epoch(data, seed=None, skip=0):
    """Return the images and labels of an epoch, batch by batch."""
    rng = None if seed is None else np.random.default_rng(seed)
    pieces = data.epoch(rng, skip, lambda batch: 1)
    return [(p.arrays["x"][0], p.arrays["label"][0]) for p in pieces]


def test_classes_are_folders(folder_of_colors):
    reader = image_folder(folder_of_colors, (6, 8))
    assert reader.classes == ["blue", "green", "red"]
    assert reader.labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert [file.name for file in reader.files[:4]] == ["0.png", "1.png", "2.png", "3.png"]
    data = source(reader)
    assert (data.rows, data.batches) == (12, 3)
    x, y = (np.concatenate(parts) for parts in zip(*batches_of_epoch(data), strict=True))
    assert y.tolist() == reader.labels.tolist()
    for image, label, i in zip(x, y, list(range(4)) * 3, strict=True):
        shade = np.float32([c * (10 - i) // 10 / 255 for c in list(COLORS.values())[label]])
        np.testing.assert_allclose(image, np.broadcast_to(shade[:, None, None], (3, 6, 8)))


def test_an_order_that_the_seed_decides(folder_of_colors):
    transforms = [
        image_transforms.random_crop(7),
        image_transforms.random_flip(),
        image_transforms.normalize([0.5] * 3, [2] * 3),
    ]
    noise = np.random.default_rng(0).integers(0, 255, (12, 10, 12, 3), np.uint8)
    reader = image_folder(folder_of_colors, (6, 8), transforms)
    for file, pixels in zip(reader.files, noise, strict=True):
        Image.fromarray(pixels).save(file)
    data = source(reader)
    whole = batches_of_epoch(data, 3)
    assert len({x.tobytes() for batch, _ in whole for x in batch}) == 12
    for skip in (0, 1, 2):
        for (x, y), (again, label) in zip(
            whole[skip:], batches_of_epoch(data, 3, skip), strict=True
        ):
            np.testing.assert_array_equal(x, again)
            np.testing.assert_array_equal(y, label)
    assert any(
        (x != other).any()
        for (x, _), (other, _) in zip(whole, batches_of_epoch(data, 4), strict=True)
    )
    first, second = batches_of_epoch(data), batches_of_epoch(data)  # in order, nothing is random
    for (x, y), (again, label) in zip(first, second, strict=True):
        np.testing.assert_array_equal(x, again)
        np.testing.assert_array_equal(y, label)


@pytest.mark.parametrize(
    ("shape", "perm", "options", "channels"),
    [
        ("N,3,6,8", None, {}, "first"),
        ("N,6,8,3", "0,3,1,2", {}, "last"),
        ("N,6,8,c", "0,3,1,2", {"layout": "NHWC"}, "last"),
        ("N,c,h,w", None, {"layout": "NCHW", "channels": 3}, "first"),
    ],
)
def test_the_layout_of_the_input(folder_of_colors, shape, perm, options, channels):
    made = color_classifier(shape, perm)
    ((x, y), *_) = batches_of_epoch(
        source(image_folder(folder_of_colors, (6, 8), **options), made, 12)
    )
    x = np.moveaxis(x, -1, 1) if channels == "last" else x
    assert x.shape == (12, 3, 6, 8)
    np.testing.assert_array_equal(x.mean((2, 3)).argmax(1), 2 - y)
    trained = OrtGradientOptimizer(made, max_iter=5, learning_rate=1.0, random_state=0)
    trained.fit(image_folder(folder_of_colors, (6, 8), **options))
    assert trained.train_losses_[-1] < trained.train_losses_[0]


def test_gray_images(folder_of_colors):
    text = "g (float[N,1,6,8] x) => (float[N,3] y) { f = Flatten(x)  y = MatMul(f, w) }"
    made = add_loss_output(float32_model(text, w=np.zeros((48, 3))), "cross_entropy")
    ((x, _), *_) = batches_of_epoch(source(image_folder(folder_of_colors, (6, 8)), made, 12))
    expected = np.asarray(Image.new("RGB", (1, 1), (0, 0, 255)).convert("L"))[0, 0] / 255
    np.testing.assert_allclose(x[0], expected, rtol=1e-6)


def test_transforms():
    pixels = np.arange(10 * 12, dtype=np.uint8).reshape(10, 12)
    image, rng = Image.fromarray(pixels), np.random.default_rng(0)
    assert image_transforms.resize(5)(image, None).size == (6, 5)
    assert image_transforms.resize((4, 7))(image, None).size == (7, 4)
    np.testing.assert_array_equal(
        image_transforms.center_crop((4, 6))(image, None), pixels[3:7, 3:9]
    )
    np.testing.assert_array_equal(
        image_transforms.random_crop((4, 6))(image, None), pixels[3:7, 3:9]
    )
    found = set()
    for _ in range(60):
        crop = np.asarray(image_transforms.random_crop((8, 11))(image, rng))
        top, left = divmod(int(crop[0, 0]), 12)
        np.testing.assert_array_equal(crop, pixels[top : top + 8, left : left + 11])
        found.add((top, left))
    assert found == {(top, left) for top in range(3) for left in range(2)}
    assert image_transforms.center_crop(24)(image, None).size == (24, 24)  # enlarged first
    flips = [np.asarray(image_transforms.random_flip()(image, rng)) for _ in range(100)]
    mirrored = [bool((f == pixels[:, ::-1]).all()) for f in flips]
    assert all(m or (f == pixels).all() for m, f in zip(mirrored, flips, strict=True))
    assert 30 < sum(mirrored) < 70
    np.testing.assert_array_equal(image_transforms.random_flip(1)(image, None), pixels)
    normal = image_transforms.normalize([0.5, 0.25], [0.5, 2])(np.float32([[[1, 1]]]), None)
    np.testing.assert_allclose(normal, [[[1, 0.375]]])


def test_sizes_that_differ_are_resized_and_cropped(tmp_path):
    for i, size in enumerate([(30, 10), (10, 30), (6, 8)]):
        (tmp_path / str(i)).mkdir()
        pixels = np.zeros((size[1], size[0], 3), np.uint8)
        pixels[size[1] // 2 - 1 : size[1] // 2 + 1, size[0] // 2 - 1 : size[0] // 2 + 1] = 255
        Image.fromarray(pixels).save(tmp_path / str(i) / "a.png")
    ((x, _),) = batches_of_epoch(source(image_folder(tmp_path, (6, 8)), size=3))
    assert (x[:, :, 2:4, 3:5] > 0.3).all()  # what is in the middle stays there
    assert (x[:, :, 0, 0] == 0).all()


def test_rotated_photographs_are_upright(tmp_path):
    (tmp_path / "a").mkdir()
    pixels = np.zeros((8, 6, 3), np.uint8)
    pixels[0] = 255
    image = Image.fromarray(pixels)
    exif = image.getexif()
    exif[0x0112] = 6  # to be turned by 90 degrees, clockwise
    image.save(tmp_path / "a" / "a.png", exif=exif)
    reader = image_folder(tmp_path, (6, 8), classes=["a", "b", "c"])
    ((x, _),) = batches_of_epoch(source(reader, size=1))
    np.testing.assert_array_equal(x[0, 0], np.float32([[0] * 7 + [1]] * 6))


def test_folders_that_cannot_be_used(folder_of_colors, monkeypatch):
    folder = folder_of_colors
    wrong_order = [image_transforms.normalize([0], [1]), image_transforms.resize(3)]
    for call, parts in (
        (lambda: image_folder(folder / "none", 8), ["none", "folder"]),
        (lambda: image_folder(folder / "red" / "deep", 8), ["deep", "class"]),
        (lambda: image_folder(folder, 8, wrong_order), ["normalize", "last"]),
        (lambda: image_folder(folder, 8, layout="HWC"), ["layout", "'HWC'"]),
        (lambda: image_folder(folder, 8, channels=2), ["channels=2", "1, 3, 4"]),
        (lambda: image_transforms.normalize([0], [0]), ["std=[0]", "above 0"]),
        (lambda: source(image_folder(folder, 8), color_classifier("N,c,h,w")), ["channels"]),
        (lambda: batches_of_epoch(source(image_folder(folder, 8))), ["6 x 8", "8 x 8", "size="]),
    ):
        with pytest.raises(ValueError, match=naming(*parts)):
            call()
    (folder / "green" / "1.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=naming("image", "1.png")):
        batches_of_epoch(source(image_folder(folder, (6, 8))))
    (folder / "empty" / "empty").mkdir(parents=True)
    with pytest.raises(ValueError, match=naming("image", "empty")):
        image_folder(folder / "empty", 8)
    with pytest.warns(UserWarning, match=naming("image", "empty")):
        assert image_folder(folder, 8).classes == sorted([*COLORS, "empty"])
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match=naming("pip install", "onnxgrad[images]")):
        image_folder(folder, 8)


def folders_of_blocks(folder, names):
    """Write an image into a folder of each name; its brightness is the number of the name."""
    for number, name in enumerate(names):
        (folder / name).mkdir()
        Image.new("RGB", (8, 6), (10 * number,) * 3).save(folder / name / "0.png")
    return folder


def test_names_that_are_whole_numbers_are_those_classes(tmp_path):
    reader = image_folder(folders_of_blocks(tmp_path, map(str, range(12))), (6, 8))
    x, labels = reader.take(np.arange(12), None)
    np.testing.assert_array_equal(labels, (x.mean((1, 2, 3)) * 25.5).round())
    assert reader.classes == list(map(str, range(12)))


def test_the_order_of_classes(tmp_path):
    folders_of_blocks(tmp_path, ["8", "3", "5"])
    named = image_folder(tmp_path, 8, classes=[3, 5, 8])
    assert (named.labels.tolist(), named.classes) == ([0, 1, 2], ["3", "5", "8"])
    assert image_folder(tmp_path, 8).labels.tolist() == [3, 5, 8]
    ninth = image_folder(tmp_path, 8, classes=list("abcdefghi"))
    assert ninth.labels.tolist() == [3, 5, 8]
    with pytest.raises(ValueError, match=naming("'3'", "a, b", "classes=['3'")):
        image_folder(tmp_path, 8, classes=list("ab"))
    (tmp_path / "03").mkdir()
    with pytest.raises(ValueError, match="03, 3, 5, 8"):
        image_folder(tmp_path, 8)
    (tmp_path / "03").rename(tmp_path / "20261128")
    with pytest.raises(ValueError, match=naming("classes=['20261128'")):
        image_folder(tmp_path, 8)


def test_folders_of_data_sets_are_no_classes(tmp_path):
    for part in ("train", "Val"):
        (tmp_path / part).mkdir()
        folders_of_blocks(tmp_path / part, ["cat", "dog"])
    with pytest.raises(ValueError, match=naming("Val'", "train'")):
        image_folder(tmp_path, 8)
    # these are classes: their images are in them
    other = tmp_path / "other"
    other.mkdir()
    assert image_folder(folders_of_blocks(other, ["test", "train"]), 8).classes == ["test", "train"]


@pytest.mark.parametrize(("scale", "most"), [(1.0, 1.0), (255, 255.0), (2, 2.0)])
def test_the_value_of_white(tmp_path, scale, most):
    (tmp_path / "a").mkdir()
    Image.new("RGB", (8, 6), (255, 128, 0)).save(tmp_path / "a" / "0.png")
    reader = image_folder(tmp_path, (6, 8), scale=scale)
    x = np.moveaxis(reader.take(np.arange(1), None)[0], 1, -1)
    np.testing.assert_allclose(x[0, 0, 0], [most, most * 128 / 255, 0], rtol=1e-6)
    normal = image_folder(tmp_path, (6, 8), [image_transforms.normalize([3], [2])], scale=scale)
    y = np.moveaxis(normal.take(np.arange(1), None)[0], 1, -1)
    np.testing.assert_allclose(y, (x - 3) / 2, rtol=1e-6)
    assert (image_folder(tmp_path, (6, 8)).describe() == reader.describe()) == (scale == 1)
    with pytest.raises(ValueError, match="scale=0"):
        image_folder(tmp_path, 8, scale=0)


def test_an_input_of_bytes_gets_those_of_the_files(folder_of_colors):
    text = """g (uint8[N,3,6,8] x) => (float[N,3] y)
        { f = Cast<to=1>(x)  p = ReduceMean<keepdims=0>(f, axes)  y = MatMul(p, w) }"""
    made = float32_model(text, w=np.zeros((3, 3)), axes=np.array([2, 3]))
    made = add_loss_output(made, "cross_entropy")
    reader = image_folder(folder_of_colors, (6, 8))
    for (raw, label), (x, other) in zip(
        batches_of_epoch(source(reader, made)), batches_of_epoch(source(reader)), strict=True
    ):
        assert raw.dtype == np.uint8
        np.testing.assert_allclose(raw / np.float32(255), x, rtol=1e-6)
        np.testing.assert_array_equal(label, other)
    with pytest.raises(ValueError, match=naming("uint8", "scale=")):
        source(image_folder(folder_of_colors, (6, 8), scale=255), made)
    with pytest.raises(ValueError, match=naming("uint8", "normalize=")):
        source(image_folder(folder_of_colors, (6, 8), [image_transforms.normalize([0], [1])]), made)


def test_images_without_labels(folder_of_colors):
    every = image_folder(folder_of_colors, (6, 8), labels=False)
    assert every.rows == 12
    assert every.labels is None
    x = every.take(np.arange(12), None)
    np.testing.assert_array_equal(
        x, image_folder(folder_of_colors, (6, 8)).take(np.arange(12), None)[0]
    )
    one = image_folder(every.files[3], (6, 8), labels=False)
    np.testing.assert_array_equal(one.take(np.arange(1), None)[0], x[3])
    with pytest.raises(ValueError, match=naming("image", "none")):
        image_folder(folder_of_colors / "none", 8, labels=False)


def test_other_numbers_of_classes_are_refused_before_training(tmp_path):
    folders_of_blocks(tmp_path, ["cat", "dog"])
    with pytest.raises(ValueError, match=naming("2 classes", "(cat, dog)", "3", "classes=")):
        source(image_folder(tmp_path, (6, 8)))
    part = image_folder(tmp_path, (6, 8), classes=["dog", "cat", "bird"])
    assert batches_of_epoch(source(part))[0][1].tolist() == [1, 0]
    for name in ("cat", "dog"):
        (tmp_path / name).rename(tmp_path / {"cat": "1", "dog": "3"}[name])
    with pytest.raises(ValueError, match=naming("4 classes", "3", "classes=['1', '3']")):
        source(image_folder(tmp_path, (6, 8)))
    (tmp_path / "3").rename(tmp_path / "2")
    assert batches_of_epoch(source(image_folder(tmp_path, (6, 8))))[0][1].tolist() == [1, 2]


def test_descriptions(folder_of_colors):
    def of(*transforms):
        return source(image_folder(folder_of_colors, (6, 8), transforms)).description

    assert of(image_transforms.random_flip()) == of(image_transforms.random_flip())
    assert of(image_transforms.random_flip()) != of(image_transforms.random_flip(0.1))
    before = of()
    Image.new("RGB", (2, 2)).save(folder_of_colors / "red" / "0.png")
    assert of() != before


def test_images_of_more_than_eight_bits(tmp_path):
    (tmp_path / "a").mkdir()
    Image.fromarray(np.full((8, 8), 40000, np.uint16)).save(tmp_path / "a" / "0.png")
    (image,), _ = image_folder(tmp_path, 8, layout="NCHW").take(np.array([0]), None)
    np.testing.assert_allclose(image, 40000 / 65535, atol=1 / 255)
    Image.fromarray(np.full((8, 8), 0.5, np.float32)).save(tmp_path / "a" / "1.tif")
    with pytest.raises(ValueError, match=r"1\.tif.*32 bits"):
        image_folder(tmp_path, 8, layout="NCHW").take(np.array([1]), None)


def test_a_share_is_held_out_without_random_transforms(folder_of_colors):
    reader = image_folder(
        folder_of_colors, (6, 8), transforms=[image_transforms.random_crop((6, 8))]
    )
    own = Trainer(color_classifier(), train=["w"], seed=3)
    own.fit(reader, validation=0.4, epochs=1, batch_size=2)
    order, count = np.random.default_rng([3, 1]).permutation(reader.rows), round(reader.rows * 0.4)
    loss = own.evaluate(reader.subset(np.sort(order[:count])))["loss"]
    assert own.history[-1]["validation_loss"] == pytest.approx(loss, rel=1e-6)
    assert own.state.step == -(-(reader.rows - count) // 2)


# -- transforms of other libraries ----------------------------------------------------------------


class Albumentation:
    """What transforms of albumentations share: keywords, and a generator of their own."""

    __module__ = "albumentations.core.transforms_interface"

    def set_random_seed(self, seed):
        self.rng = np.random.default_rng(seed)

    def __call__(self, *, image):
        return {"image": np.rot90(image, self.rng.integers(4)).copy()}


class Vision:
    """What those of torchvision share: one argument, and the global generator of torch."""

    __module__ = "torchvision.transforms.v2"

    def __call__(self, image):
        import torch

        return image.rotate(90 * int(torch.randint(4, ())), expand=True)


def folder_of_noise(folder, size=8):
    """Return a folder of two classes with images that show how they were turned."""
    rng = np.random.default_rng(0)
    for name in "ab":
        (folder / name).mkdir()
        for i in range(6):
            pixels = rng.integers(0, 255, (size, size, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i}.png")
    return folder


def derived(kind):
    """Return a transform of a user's class, which is known by its base."""
    return type("Own", (kind,), {"__module__": "__main__"})()


@pytest.mark.parametrize("kind", [Albumentation, Vision, lambda: derived(Albumentation)])
def test_transforms_of_other_libraries_are_drawn_by_seed_and_row(tmp_path, kind):
    if kind is Vision:
        pytest.importorskip("torch")
    plain = image_folder(folder_of_noise(tmp_path), 8, channels=3)
    reader = image_folder(tmp_path, 8, [kind()], channels=3)
    rows = np.arange(12)
    still = reader.take(rows, None)[0]
    np.testing.assert_array_equal(still, plain.take(rows, None)[0])  # evaluations change nothing
    first, again = (reader.take(rows, 5)[0] for _ in range(2))
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(first[7:9], reader.take(rows[7:9], 5)[0])
    turned = [
        next(k for k in range(4) if np.array_equal(np.rot90(a, k, (1, 2)), b))
        for a, b in zip(still, first, strict=True)
    ]
    assert len(set(turned)) > 1
    assert not np.array_equal(first, reader.take(rows, 6)[0])


def test_global_generators_stay_as_they_were(tmp_path):
    torch = pytest.importorskip("torch")
    reader = image_folder(folder_of_noise(tmp_path), 8, [Vision()], channels=3)
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    reader.take(np.arange(4), 1)
    assert torch.equal(torch.rand(2), expected)


@pytest.mark.parametrize(
    "result", [np.zeros((8, 8, 3), np.float32), np.zeros((8, 8), np.uint8), np.zeros(3, np.uint8)]
)
def test_results_that_are_no_images_are_refused(tmp_path, result):
    class Wrong(Albumentation):
        def __call__(self, *, image):
            return {"image": result}

    reader = image_folder(folder_of_noise(tmp_path), 8, [Wrong()], channels=3)
    with pytest.raises(ValueError, match=naming("Wrong returns", "image of 8 bits", "leave out")):
        reader.take(np.arange(2), 1)

    class Tensor(Vision):
        def __call__(self, image):
            return np.asarray(image)

    pytest.importorskip("torch")
    reader = image_folder(tmp_path, 8, [Tensor()], channels=3)
    with pytest.raises(ValueError, match=naming("Tensor", "ndarray")):
        reader.take(np.arange(2), 1)


def test_models_get_no_transforms_that_only_augment():
    made = float32_model(
        "g (float[N,3,6,8] x) => (float[N,3] y) { y = ReduceMean<keepdims=0>(x, axes) }",
        axes=np.array([2, 3]),
    )
    last = image_transforms.normalize([0.5] * 3, [1.0] * 3)
    for augmenting in (Albumentation(), Vision()):
        raw, plain = preprocess(made, [augmenting, last]), preprocess(made, [last])
        assert raw.SerializeToString() == plain.SerializeToString()


@pytest.mark.parametrize("channels", [1, 3])
def test_transforms_of_albumentations(tmp_path, channels):
    albumentations = pytest.importorskip("albumentations")
    folder_of_noise(tmp_path)
    transform = albumentations.Compose(
        [albumentations.HorizontalFlip(p=0.5), albumentations.RandomBrightnessContrast(p=0.8)]
    )
    reader = image_folder(
        tmp_path,
        8,
        [transform, image_transforms.normalize([0.5] * channels, [1.0] * channels)],
        channels=channels,
    )
    rows = np.arange(12)
    first = reader.take(rows, 5)[0]
    np.testing.assert_array_equal(first, reader.take(rows, 5)[0])
    assert not np.array_equal(first, reader.take(rows, None)[0])
    assert not np.array_equal(first, reader.take(rows, 6)[0])


def test_transforms_of_torchvision(tmp_path):
    v2 = pytest.importorskip("torchvision.transforms.v2", exc_type=Exception)
    folder_of_noise(tmp_path)
    transform = v2.Compose([v2.RandomHorizontalFlip(), v2.ColorJitter(0.4, 0.4)])
    reader = image_folder(tmp_path, 8, [transform], channels=3)
    rows = np.arange(12)
    first = reader.take(rows, 5)[0]
    np.testing.assert_array_equal(first, reader.take(rows, 5)[0])
    assert not np.array_equal(first, reader.take(rows, 6)[0])
