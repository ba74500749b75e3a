"""Folders of language models: what is read of them, and what is written anew."""

import filecmp
import json
import os
import shutil
import warnings
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import onnxgrad as og
from onnxgrad.model import external
from tests.support.errors import naming
from tests.support.models import parse_model


def table_model() -> onnx.ModelProto:
    """Return a model whose logits are rows of an identity matrix."""
    text = "f (int64[N,T] input_ids) => (float[N,T,4] logits) { logits = Gather(w, input_ids) }"
    return parse_model(text, opset=20, w=np.eye(4, dtype=np.float32))


def write_optimum_folder(path: Path, name: str = "model.onnx", **config) -> Path:
    """Write `table_model` as optimum writes models, and return the folder."""
    path.mkdir(exist_ok=True)
    (path / name).parent.mkdir(exist_ok=True)
    onnx.save(table_model(), path / name)
    (path / "config.json").write_text(json.dumps({"vocab_size": 4} | config))
    return path


def files_beside_model(folder: Path) -> list[str]:
    names = (file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    return sorted(name for name in names if not name.startswith("model.onnx"))


def tokens_of_genai(folder: Path, ids: list[int], count: int = 8) -> list[int]:
    """Return what onnxruntime-genai says after `ids`."""
    genai = pytest.importorskip("onnxruntime_genai")
    model = genai.Model(str(folder))
    params = genai.GeneratorParams(model)
    params.set_search_options(max_length=len(ids) + count, do_sample=False)
    generator = genai.Generator(model, params)
    generator.append_tokens(ids)
    while not generator.is_done():
        generator.generate_next_token()
    return [int(i) for i in generator.get_sequence(0)][len(ids) :]


# -- reading ------------------------------------------------------------------------------------


def test_what_a_folder_of_genai_says(genai_folder):
    folder = og.load_folder(genai_folder)
    assert (folder.kind, folder.model) == ("genai", genai_folder / "model.onnx")
    assert (folder.bos_id, folder.eos_ids, folder.pad_id) == (0, (1,), 2)
    assert folder.context_length == 256
    assert folder.vocab_size == folder.tokenizer.size
    assert len(og.trainable(folder)) == len(og.trainable(folder.model))


def test_several_ends_and_other_names(tmp_path):
    write_optimum_folder(
        tmp_path, "onnx/model.onnx", eos_token_id=[3, 2], n_positions=9, pad_token_id=None
    )
    (tmp_path / "generation_config.json").write_text('{"bos_token_id": 1}')
    folder = og.load_folder(tmp_path)
    assert folder.model == tmp_path / "onnx" / "model.onnx"
    assert (folder.eos_ids, folder.bos_id, folder.pad_id) == ((3, 2), 1, None)
    assert folder.context_length == 9


def test_the_only_file_is_the_model_and_one_of_several_is_named(tmp_path):
    write_optimum_folder(tmp_path, "decoder.onnx")
    assert og.load_folder(tmp_path).model.name == "decoder.onnx"
    shutil.copy(tmp_path / "decoder.onnx", tmp_path / "other.onnx")
    with pytest.raises(og.ModelError, match=naming("['decoder.onnx', 'other.onnx']", "which")):
        og.load_folder(tmp_path)
    assert og.load_folder(tmp_path, "other.onnx").model.name == "other.onnx"


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({}, ["genai_config.json", "config.json"]),
        ({"config.json": "{}"}, ["model.onnx", "onnx/model.onnx"]),
        ({"config.json": "{"}, ["config.json", "JSON"]),
        ({"config.json": "[]"}, ["config.json", "no JSON object"]),
        ({"genai_config.json": '{"model": {"decoder": {"filename": "m.onnx"}}}'}, ["'m.onnx'"]),
        ({"genai_config.json": '{"model": {"decoder": {"pipeline": [{}]}}}'}, ["pipeline"]),
    ],
)
def test_folders_of_neither_kind(files, named, tmp_path):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(og.ModelError, match=naming(*named)):
        og.load_folder(tmp_path)


def test_missing_data_and_tokenizer_are_named(genai_folder, tmp_path):
    home = Path(shutil.copytree(genai_folder, tmp_path / "copy"))
    (home / "model.onnx.data").unlink()
    (home / "tokenizer.json").unlink()
    folder = og.load_folder(home)
    with pytest.raises(og.ModelError, match=r"'model\.onnx\.data'"):
        og.trainable(folder)
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        folder.tokenizer  # noqa: B018


# -- writing ------------------------------------------------------------------------------------


def test_a_folder_of_genai_comes_out_with_other_weights(genai_folder, tmp_path):
    folder, name = og.load_folder(genai_folder), "model.layers.1.mlp.down_proj.MatMul.weight"
    old = external_of(folder.model)
    proto = onnx.load(folder.model)
    tensor = next(t for t in proto.graph.initializer if t.name == name)
    changed = 2 * onnx.numpy_helper.to_array(tensor) + 1
    tensor.CopyFrom(onnx.numpy_helper.from_array(changed, name))
    new = og.save_folder(proto, tmp_path / "new", like=folder)
    assert new.kind == "genai"
    assert external_of(new.model) == old
    assert files_beside_model(new.path) == files_beside_model(genai_folder) != []
    _, different, errors = filecmp.cmpfiles(
        genai_folder, new.path, files_beside_model(new.path), shallow=False
    )
    assert not different
    assert not errors
    ids = [5, 6, 7]
    assert tokens_of_genai(new.path, ids) != tokens_of_genai(genai_folder, ids)
    again = og.save_folder(folder, tmp_path / "again", like=genai_folder)
    assert tokens_of_genai(again.path, ids) == tokens_of_genai(genai_folder, ids)
    assert sorted(os.listdir(tmp_path)) == ["again", "new"]


def external_of(file: Path) -> dict[str, str]:
    """Return the file of each external tensor."""
    model = onnx.load(file, load_external_data=False)
    return {n: external._location_entry(t).value for n, t in external.external_tensors(model)}


def test_optimums_folder_comes_out_and_a_trainer_goes_in(tmp_path):
    old = write_optimum_folder(tmp_path / "old", "onnx/model.onnx")
    (old / "vocab.txt").write_text("a\nb")
    (old / ".git").mkdir()
    (old / ".git" / "index").write_text("")
    ids = np.array([[0, 1, 2, 3]])
    trainer = og.Trainer(og.load_folder(old), "cross_entropy", loss_options={"axis": -1})
    trainer.fit(ids, np.array([[1, 2, 3, 0]]), epochs=2)
    new = og.save_folder(trainer, tmp_path / "deep" / "new", like=old)
    assert files_beside_model(new.path) == ["config.json", "onnx/model.onnx", "vocab.txt"]
    (logits,) = ort.InferenceSession(new.model).run(None, {"input_ids": ids})
    np.testing.assert_array_equal(logits, trainer.predict(ids))


def test_data_in_several_files_stay_there(tmp_path):
    old = write_optimum_folder(tmp_path / "old")
    options = {"save_as_external_data": True, "size_threshold": 0}
    onnx.save_model(table_model(), old / "model.onnx", all_tensors_to_one_file=False, **options)
    assert external_of(old / "model.onnx") == {"w": "w"}
    trained = og.load_folder(og.save_folder(og.load_folder(old), tmp_path / "new", like=old).path)
    assert external_of(trained.model) == {"w": "w"}
    assert og.trainable(trained)[0].size == 16


def test_existing_folders_are_kept(tmp_path):
    old, new = write_optimum_folder(tmp_path / "old"), tmp_path / "new"
    new.mkdir()
    og.save_folder(old / "model.onnx", new, like=old)  # an empty one
    (new / "mine.txt").write_text("mine")
    (new / "config.json").write_text("{}")
    with pytest.raises(FileExistsError, match=naming(str(new), "not empty")):
        og.save_folder(old / "model.onnx", new, like=old)
    og.save_folder(old / "model.onnx", new, like=old, overwrite=True)
    assert (new / "mine.txt").read_text() == "mine"
    assert json.loads((new / "config.json").read_text()) == {"vocab_size": 4}
    (tmp_path / "documents").mkdir()
    (tmp_path / "documents" / "mine.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=naming("documents", "another folder")):
        og.save_folder(old / "model.onnx", tmp_path / "documents", like=old, overwrite=True)
    with pytest.raises(FileExistsError, match=naming("mine.txt", "folder")):
        og.save_folder(old / "model.onnx", new / "mine.txt", like=old)
    with pytest.raises(ValueError, match=naming(str(old / "new"), "copied")):
        og.save_folder(old / "model.onnx", old / "new", like=old)
    assert sorted(os.listdir(tmp_path)) == ["documents", "new", "old"]


def test_a_failure_leaves_nothing(tmp_path, monkeypatch):
    old, new = write_optimum_folder(tmp_path / "old"), tmp_path / "new"

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(external, "write_filled", full)
    with pytest.raises(OSError, match="No space"):
        og.save_folder(old / "model.onnx", new, like=old)
    assert os.listdir(tmp_path) == ["old"]


def test_other_models_are_copied_and_said(tmp_path):
    old = write_optimum_folder(tmp_path / "old")
    shutil.copy(old / "model.onnx", old / "model_int8.onnx")
    with pytest.warns(UserWarning, match=r"\['model_int8\.onnx'\]"):
        new = og.save_folder(old / "model.onnx", tmp_path / "new", like=old)
    assert filecmp.cmp(old / "model_int8.onnx", new.path / "model_int8.onnx", shallow=False)


def test_a_model_does_not_replace_the_data_that_it_reads(tmp_path, monkeypatch):
    monkeypatch.setattr(external, "IN_MODEL", 100)
    monkeypatch.setattr(external, "SMALL", 10)
    old = write_optimum_folder(tmp_path / "old")
    options = {"save_as_external_data": True, "size_threshold": 0}
    onnx.save_model(table_model(), old / "model.onnx", location="model.onnx.data", **options)
    with pytest.raises(ValueError, match=naming(str(old), "reads")):
        og.save_folder(old / "model.onnx", old, like=old, overwrite=True)
    new = og.save_folder(old / "model.onnx", tmp_path / "new", like=old)
    shutil.rmtree(old)
    (logits,) = ort.InferenceSession(new.model).run(None, {"input_ids": np.array([[2]])})
    assert logits.argmax() == 2


def test_a_model_with_other_inputs_or_outputs_is_refused(tmp_path):
    """As that of losses of preferences, whose adapters and weights fit the language model."""
    old, new = write_optimum_folder(tmp_path / "old"), tmp_path / "new"
    policy = og.language.sequence_log_probs(og.add_lora(old / "model.onnx", "w", rank=2))
    with pytest.raises(ValueError, match=naming("['logits']", "model.onnx", "load_adapter")):
        og.save_folder(policy, new, like=old)
    asking = parse_model(
        """f (int64[N,T] input_ids, float[4] b) => (float[N,T,4] logits) {
            a = Gather(w, input_ids) logits = Add(a, b) }""",
        opset=20,
        w=np.eye(4, dtype=np.float32),
    )
    for adapter in (None, "mine"):
        model = asking if adapter is None else og.add_lora(asking, "w", rank=2)
        with pytest.raises(ValueError, match=naming("['b']", "model.onnx")):
            og.save_folder(model, new, like=old, adapter=adapter)
    assert not new.exists()
    og.save_adapter(policy, tmp_path / "adapter")
    tuned = og.load_adapter(og.load_folder(old), tmp_path / "adapter")
    assert og.save_folder(tuned, new, like=old, adapter="mine").path == new


def test_links_of_a_cache_become_files(tmp_path):
    blobs = write_optimum_folder(tmp_path / "blobs")
    (tmp_path / "snapshot").mkdir()
    for file in blobs.iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(file)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        new = og.save_folder(
            tmp_path / "snapshot" / "model.onnx", tmp_path / "new", blobs.parent / "snapshot"
        )
    assert not any(file.is_symlink() for file in new.path.iterdir())
