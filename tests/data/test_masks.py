"""Pictures with masks of classes, in folders and in files of COCO."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import onnxgrad as og

Image = pytest.importorskip("PIL.Image")
pytest.importorskip("PIL.ImageDraw")
from tests.support.errors import naming  # noqa: E402
from tests.support.mask_folders import COLORS, first_batch, pixel_model, write_masks  # noqa: E402

Segmentation = og.tasks.segmentation.Segmentation


@pytest.mark.parametrize("mode", ["L", "P"])
def test_a_folder(tmp_path, mode):
    def unknown(mask):
        mask[0] = 255
        return mask

    root = write_masks(tmp_path / "d", mode=mode, edit=unknown)
    task = Segmentation(pixel_model(3), root, image_size=None)
    X, y = first_batch(task.data)
    assert X.shape == (6, 3, 6, 7)
    assert (X.dtype, y.dtype) == (np.float32, np.int64)
    for i in range(6):
        with Image.open(root / "images" / f"{i}.png") as picture:
            resized = np.asarray(picture.resize((7, 6), Image.Resampling.BILINEAR))
        np.testing.assert_allclose(X[i], np.moveaxis(resized, -1, 0) / 255, atol=1e-6)
        with Image.open(root / "masks" / f"{i}.png") as mask:
            full = np.asarray(mask).astype(int)
        rows, columns = np.arange(6) * 2 + 1, np.arange(7) * 2 + 1
        nearest = full[np.ix_(rows, columns)]
        assert np.array_equal(y[i], np.where(nearest == 255, -100, nearest))
    assert [*task.classes] == ["0", "1", "2"]
    assert first_batch(task.data.subset(np.array([4])))[1].tolist() == y[4:5].tolist()


def test_one_score_gets_floats(tmp_path):
    def unknown(mask):
        mask[:6] = 255
        return mask

    root = write_masks(tmp_path, classes=2, edit=unknown)
    for last in (False, True):
        task = Segmentation(pixel_model(1, last=last), root)
        X, y = first_batch(task.data)
        y = y[..., 0] if last else y[:, 0]
        assert y.dtype == np.float32
        assert np.isnan(y[:, :3]).all()
        assert np.isin(y[:, 3:], (0, 1)).all()
        assert X.shape == ((6, 6, 7, 3) if last else (6, 3, 6, 7))


def test_black_and_white_masks(tmp_path):
    white = write_masks(tmp_path / "w", classes=2, edit=lambda mask: mask * np.uint8(255))
    bits = write_masks(tmp_path / "b", classes=2, mode="1")
    with pytest.raises(ValueError, match="ignore=None"):
        Segmentation(pixel_model(1), white)
    expected = first_batch(Segmentation(pixel_model(1), bits).data)[1]
    assert np.array_equal(
        first_batch(Segmentation(pixel_model(1), white, ignore=None).data)[1], expected
    )
    assert {*expected.ravel()} == {0, 1}
    grown = write_masks(
        tmp_path / "g", edit=lambda mask: np.where(mask == 2, 255, mask).astype("u1")
    )
    with pytest.raises(ValueError, match=r"0\.png.*ignore=255"):
        Segmentation(pixel_model(3), grown, ignore=None)


def test_colors_leave_masks_alone(tmp_path):
    root = write_masks(tmp_path)
    plain, changed = (
        Segmentation(pixel_model(3), root, augment=names) for names in ("none", "colors")
    )
    (X, y), (other, same) = (first_batch(task.data, seed=3) for task in (plain, changed))
    np.testing.assert_array_equal(y, same)
    assert (other != X).any()


def test_augmentation_moves_masks_as_pictures(tmp_path):
    """A pixel keeps its class, whatever a flip and a crop do; the seed decides, and the row."""
    root = write_masks(tmp_path, size=(24, 28))
    seen = []

    def shifted(picture, mask, rng):
        by = int(rng.integers(5))
        box = (by, 0, picture.width + by, picture.height)
        seen.append(by)
        return picture.crop(box), mask.crop(box)

    augment = [og.data.random_flip(), og.data.random_crop((12, 14)), shifted]
    task = Segmentation(pixel_model(3, size="12,14"), root, augment=augment)
    X, y = first_batch(task.data, seed=3)
    assert seen
    colors = np.moveaxis(X, 1, -1)
    assert np.array_equal(colors * 255, COLORS[y])
    for seed, same in ((3, True), (4, False)):
        again, _ = first_batch(task.data, seed=seed)
        assert np.array_equal(X, again) == same
    single = np.stack([task.data.take(np.array([i]), 3)[0][0] for i in range(6)])
    order = np.random.default_rng(3).permutation(6)
    assert np.array_equal(single[order], X)
    plain = Segmentation(pixel_model(3, size="12,14"), root)
    assert np.array_equal(
        first_batch(task.data)[0], first_batch(plain.data)[0]
    )  # not in evaluations
    assert task.data.describe() != plain.data.describe()

    def lost(picture, mask, rng):
        return picture, mask.convert("L")

    with pytest.raises(ValueError, match=naming("lost", "the mode 'P'")):
        first_batch(Segmentation(pixel_model(3), root, augment=[lost]).data, seed=1)


def write_polygons(tmp_path: Path, rle=False) -> Path:
    """Write two pictures with squares, a file of COCO, and an RLE of the last one."""
    annotations = [
        {"id": 1, "image_id": 5, "category_id": 7, "segmentation": [[2, 2, 9, 2, 9, 9, 2, 9]]},
        {"id": 2, "image_id": 5, "category_id": 3, "segmentation": [[4, 4, 6, 4, 6, 6, 4, 6]]},
    ]
    if rle:
        counts = [12 * 3, 24, 12 * 9]  # by columns: the fourth and the fifth of 14
        rle = {"size": [12, 14], "counts": counts}
        annotations.append({"id": 3, "image_id": 6, "category_id": 3, "segmentation": rle})
    images = [{"id": n, "file_name": f"{n}.png", "width": 14, "height": 12} for n in (5, 6)]
    for image in images:
        Image.new("RGB", (14, 12)).save(tmp_path / image["file_name"])
    categories = [{"id": 7, "name": "ship"}, {"id": 3, "name": "car"}]
    content = {"images": images, "annotations": annotations, "categories": categories}
    path = tmp_path / "a.json"
    path.write_text(json.dumps(content))
    return path


def test_coco_polygons(tmp_path):
    task = Segmentation(pixel_model(3, size="12,14"), write_polygons(tmp_path))
    assert [*task.classes] == ["background", "car", "ship"]
    _, y = first_batch(task.data)
    expected = np.zeros((2, 12, 14), int)
    expected[0, 2:10, 2:10] = 2
    expected[0, 4:7, 4:7] = 1
    assert np.array_equal(y, expected)


def test_coco_rle(tmp_path):
    packed = pytest.importorskip("pycocotools.mask")
    path = write_polygons(tmp_path, rle=True)
    expected = np.zeros((12, 14), int)
    expected[:, 3:5] = 1
    assert np.array_equal(
        first_batch(Segmentation(pixel_model(3, size="12,14"), path).data)[1][1], expected
    )
    content = json.loads(path.read_text())
    pixels_of = packed.encode(np.asfortranarray(expected.astype(np.uint8)))
    rle = {"size": pixels_of["size"], "counts": pixels_of["counts"].decode()}
    content["annotations"][2]["segmentation"] = rle
    path.write_text(json.dumps(content))
    assert np.array_equal(
        first_batch(Segmentation(pixel_model(3, size="12,14"), path).data)[1][1], expected
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["annotations"][0].update(category_id=9), r"\(id 1\): no category .*9"),
        (lambda c: c["annotations"][1].update(segmentation=[]), "id 2"),
        (lambda c: c["annotations"][1].update(segmentation=[[1, 2, 3]]), "id 2"),
        (lambda c: c["images"][0].update(width=99), r"5\.png.*\(14, 12\)"),
        (lambda c: c["images"][0].update(file_name="no.png"), r"no\.png"),
    ],
)
def test_coco_files_that_are_refused(tmp_path, change, message):
    path = write_polygons(tmp_path)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        Segmentation(pixel_model(3, size="12,14"), path)


def spoil_mask(root, image):
    image.save(root / "masks" / "2.png")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda r: spoil_mask(r, Image.new("RGB", (14, 12))), r"2\.png'.*'RGB'"),
        (lambda r: spoil_mask(r, Image.new("L", (14, 13))), r"2\.png'.* size \(14, 13\)"),
        (lambda r: spoil_mask(r, Image.new("L", (14, 12), 9)), r"2\.png'.* 9"),
        (lambda r: (r / "masks" / "2.png").unlink(), r"\['2'\].*mask"),
        (lambda r: (r / "masks").rename(r / "labels"), "folder 'masks'"),
        (lambda r: (r / "images" / "2.png").write_bytes(b"x"), r"image '.*2\.png'"),
        (lambda r: (r / "masks" / "2.png").write_bytes(b"x"), r"mask '.*2\.png'"),
        (lambda r: (r / "classes.txt").write_text("a\nb"), "classes=3"),
    ],
)
def test_folders_that_are_refused(tmp_path, spoil, message):
    root = write_masks(tmp_path)
    spoil(root)
    with pytest.raises(ValueError, match=message):
        Segmentation(pixel_model(3), root, classes=3)
