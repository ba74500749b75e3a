"""Pictures with boxes in files of COCO and YOLO."""

import json

import numpy as np
import pytest

import onnxgrad as og
from onnxgrad.tasks.detection import Detection
from tests.support.detection_cases import small_yolox
from tests.support.errors import naming

pytest.importorskip("pycocotools")  # of the metrics of a task


def write_picture(path, size=(60, 40), box=None):
    image = pytest.importorskip("PIL.Image").new("RGB", size, (120, 130, 140))
    if box is not None:
        image.paste((250, 20, 20), tuple(box))
    image.save(path)


def write_coco(folder, notes, **changed):
    (folder / "images").mkdir(parents=True)
    images = [{"id": 7, "file_name": "a.png", "width": 60, "height": 40}]
    images.append({"id": 3, "file_name": "b.png", "width": 60, "height": 40})
    for image in images:
        write_picture(folder / "images" / image["file_name"])
    categories = [{"id": 90, "name": "cat"}, {"id": 4, "name": "dog"}]
    whole = {"images": images, "annotations": notes, "categories": categories, **changed}
    (folder / "instances.json").write_text(json.dumps(whole))
    return folder


def write_yolo(folder, lines, names="[dog, cat]"):
    for part in ("images", "labels"):
        (folder / part / "train").mkdir(parents=True)
    write_picture(folder / "images" / "train" / "a.png")
    (folder / "labels" / "train" / "a.txt").write_text(lines)
    (folder / "data.yaml").write_text(f"train: images/train\nnames: {names}\n")
    return folder


BOX = {"id": 1, "image_id": 7, "category_id": 90, "bbox": [6, 10, 24, 20]}


def test_reading_coco(tmp_path):
    crowd = {"id": 2, "image_id": 7, "category_id": 4, "bbox": [0, 0, 9, 9], "iscrowd": 1}
    task = Detection(small_yolox(), write_coco(tmp_path / "c", [BOX, crowd]), head="yolox")
    assert task.classes == ["dog", "cat"]
    assert task.data.rows == 2
    X, y = task.data.take(np.arange(2), None)
    # 60 x 40 -> 32 x 21, 5 rows of gray above
    scale = 32 / 60
    expected = [1, 6 * scale, 10 * scale + 5, 30 * scale, 30 * scale + 5]
    np.testing.assert_allclose(y[0], [expected], rtol=1e-6)
    assert (y[1] == -1).all()
    assert X.shape == (2, 3, 32, 32)
    assert X.dtype == np.float32
    assert np.allclose(X[0, :, 0, 0], 114)
    assert np.allclose(X[0, :, 16, 16], [140, 130, 120])


def test_reading_yolo(tmp_path):
    pytest.importorskip("yaml")
    task = Detection(small_yolox(), write_yolo(tmp_path / "y", "1 0.3 0.5 0.4 0.5\n"), head="yolox")
    same = Detection(small_yolox(), write_coco(tmp_path / "c", [BOX]), head="yolox")
    assert task.classes == ["dog", "cat"]
    assert task.validation is None
    np.testing.assert_allclose(
        task.data.take([0], None)[1], same.data.take([0], None)[1], rtol=1e-5
    )
    (tmp_path / "y" / "data.yaml").write_text(
        "train: images/train\nval: images/train\nnames: [dog]"
    )
    with pytest.raises(ValueError, match=naming("class 1", "1")):
        task.read(tmp_path / "y")
    with pytest.raises(ValueError, match="classes"):
        Detection(small_yolox(), tmp_path / "c", head="yolox").read(
            write_yolo(tmp_path / "z", "", "[a, b]")
        )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"category_id": 5}, r"annotation 0 .id 1.: .*category.* 5"),
        ({"image_id": 9}, r"annotation 0 .id 1.: .*image.* 9"),
        ({"bbox": [40, 10, 24, 20]}, r"annotation 0 .id 1.: .*beyond"),
        ({"bbox": [4, 10, 0, 20]}, r"annotation 0 .id 1.: .*empty"),
        ({"bbox": [4, 10]}, r"annotation 0 .id 1.: 'bbox'"),
    ],
)
def test_broken_annotations_of_coco_name_the_row(tmp_path, changed, message):
    with pytest.raises(ValueError, match=message):
        Detection(small_yolox(), write_coco(tmp_path / "c", [BOX | changed]), head="yolox")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("0 .5 .5 .2 .2\n7 .5 .5 .2 .2", r"a.txt', line 2: class 7"),
        ("0 .5 .5 .2", r"a.txt', line 1: .*class"),
        ("0 .95 .5 .2 .2", r"a.txt', line 1: .*beyond"),
    ],
)
def test_broken_labels_of_yolo_name_the_line(tmp_path, lines, message):
    pytest.importorskip("yaml")
    with pytest.raises(ValueError, match=message):
        Detection(small_yolox(), write_yolo(tmp_path / "y", lines), head="yolox")


def test_missing_files_are_named(tmp_path):
    folder = write_coco(tmp_path / "c", [BOX])
    write_picture(folder / "images" / "a.png", (60, 50))
    task = Detection(small_yolox(), folder, head="yolox")
    with pytest.raises(ValueError, match=naming("a.png", "60 x 50", "(60, 40")):
        task.data.take([0], None)
    (folder / "images" / "b.png").unlink()
    with pytest.raises(ValueError, match=r"image.*b\.png"):
        Detection(small_yolox(), folder, head="yolox")
    with pytest.raises(ValueError, match=naming("instances.json", "data.yaml", "pass")):
        Detection(small_yolox(), tmp_path, head="yolox")


def test_colors_change_and_boxes_stay(tmp_path):
    folder = write_coco(tmp_path / "c", [BOX])
    plain, changed = (
        og.data.annotated_images(folder, 32, t) for t in ((), [og.data.random_colors()])
    )
    (X, y), (other, same) = (reader.take([0], 3) for reader in (plain, changed))
    np.testing.assert_array_equal(y, same)
    assert np.abs(X - other).max() > 0.01
    np.testing.assert_array_equal(other, changed.take([0], 3)[0])
    np.testing.assert_array_equal(X, changed.take([0], None)[0])
    assert changed.describe() != plain.describe()


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L"])
def test_random_colors(mode):
    image = pytest.importorskip("PIL.Image").new("RGB", (2, 2), (200, 100, 50)).convert(mode)
    change, rng = og.data.random_colors(hue=0, saturation=0, value=0.5), np.random.default_rng(0)
    changed = [np.asarray(change(image, rng)) for _ in range(20)]
    assert {each.shape for each in changed} == {np.asarray(image).shape}
    levels = [each[0, 0].max() if mode == "L" else each[0, 0, 0] for each in changed]
    assert max(levels) > np.asarray(image)[0, 0].flat[0] > min(levels)
    if mode == "RGB":
        for each in changed:  # hue and saturation stay, up to rounding
            np.testing.assert_allclose(each[0, 0] / each[0, 0, 0], [1, 0.5, 0.25], atol=0.03)
    if mode == "RGBA":
        assert {int(each[0, 0, 3]) for each in changed} == {255}
    assert change(image, None) is image
    with pytest.raises(ValueError, match="hue=2"):
        og.data.random_colors(hue=2)


def test_flips_follow_the_seed_and_the_row(tmp_path):
    folder = write_coco(tmp_path / "c", [BOX, BOX | {"id": 2, "image_id": 3}])
    task = Detection(small_yolox(), folder, head="yolox", augment=[og.data.random_flip()])
    plain = task.data.take([0], None)[1]
    drawn = [task.data.take([0], seed)[1] for seed in range(8)]
    left = {float(y[0, 0, 1]) for y in drawn}
    assert left == {float(plain[0, 0, 1]), float(np.float32(32) - plain[0, 0, 3])}
    again = task.data.take([1, 0], 5)[1][1:]
    np.testing.assert_array_equal(drawn[5], again)
