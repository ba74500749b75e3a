"""Language models in the shell: a folder in, a folder out."""

import html
import json
import os
import re

import numpy as np
import onnx
import pytest
from language_models import SENTENCES

import onnxgrad as og
from tests.support.commands import (
    as_json,
    assert_names,
    refusal,
    run_command,
    succeed,
    weights_of_file,
)

pytest.importorskip("tokenizers")
from tests.support.text_models import CHAT, IM, bpe_tokenizer, text_beginnings, token_model

LOSS = ("--loss", "causal_lm")


@pytest.fixture(autouse=True)
def folder_of_language_model(tmp_path, monkeypatch):
    """The folder `lm` with a small model, and files of texts; the current folder is above."""
    monkeypatch.chdir(tmp_path)
    own = bpe_tokenizer()
    os.mkdir("lm")
    onnx.save(token_model(), "lm/model.onnx")
    own.backend.save("lm/tokenizer.json")
    configuration = {"vocab_size": own.size, "eos_token_id": 1, "max_position_embeddings": 64}
    special = {"eos_token": "</s>", "pad_token": "<pad>", "bos_token": "<s>", "chat_template": IM}
    for name, content in (("config.json", configuration), ("tokenizer_config.json", special)):
        (tmp_path / "lm" / name).write_text(json.dumps(content))
    rows = [json.dumps({"text": text}) for text in text_beginnings(30)]
    (tmp_path / "texts.jsonl").write_text("\n".join(rows))
    (tmp_path / "texts.txt").write_text("\n".join(SENTENCES[:3]))
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")


def test_a_folder_trains_as_in_python(tmp_path):
    options = ("--validation", "0", "--epochs", 2, "--batch-size", 8, "--max-length", 12)
    done = succeed("train", "lm", "texts.jsonl", *LOSS, *options, "--output", "out")
    assert "--max-length 12" in done.stderr
    with pytest.warns(UserWarning, match="max_length=12"):
        data = og.language.texts("texts.jsonl", og.load_folder("lm"), 12)
    own = og.Trainer(og.load_folder("lm"), "causal_lm", metrics=["perplexity"])
    own.fit(data, epochs=2, batch_size=8)
    new = og.load_folder("out")
    assert sorted(os.listdir("out")) == sorted(os.listdir("lm"))
    for name, array in weights_of_file(new.model).items():
        np.testing.assert_array_equal(array, own.state.weights[name])
    assert os.path.exists("out.png")

    expected = own.evaluate(og.language.texts("texts.jsonl", new))
    found = as_json("eval", "out", "texts.jsonl", *LOSS)
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert found["metrics"] == {"perplexity": pytest.approx(expected["perplexity"], rel=1e-6)}


def test_a_default_folder_that_exists_gets_a_number():
    line = ("train", "lm", "texts.jsonl", *LOSS, "--validation", "0", "--epochs", 1)
    assert as_json(*line)["files"] == ["trained", "trained.png"]
    assert as_json(*line)["files"] == ["trained-2", "trained-2.png"]


def test_packed_texts_fill_fewer_rows():
    line = ("train", "lm", "texts.jsonl", *LOSS, "--max-length", 12, "--validation", 0, "--dry-run")
    model = og.load_folder("lm")
    with pytest.warns(UserWarning, match="max_length=12"):
        padded = og.language.texts("texts.jsonl", model, 12)
    packed = og.language.texts("texts.jsonl", model, 12, packing=True)
    assert as_json(*line)["rows"] == padded.rows
    assert as_json(*line, "--packing")["rows"] == packed.rows < padded.rows


def test_samples_are_shown_and_recorded(tmp_path):
    options = ("--epochs", 1, "--prompt", "the cat", "--prompt", "a dog", "--record", "record")
    samples = as_json("train", "lm", "texts.txt", *LOSS, *options, "-o", "out")["samples"]
    assert [s["prompt"] for s in samples] == ["the cat", "a dog"]
    assert samples[0]["text"] == og.language.generate("out", "the cat")
    recorded = json.loads((tmp_path / "record" / "run.json").read_text())["samples"]
    assert recorded == [[s["prompt"], s["text"]] for s in samples]
    succeed("report", "record")
    page = html.unescape((tmp_path / "record" / "report.html").read_text())
    assert samples[0]["text"] in page
    assert as_json("generate", "out", "the cat") == samples[0]


def test_options_of_generation_are_those_of_python():
    drawn = ("--max-new-tokens", 5, "--temperature", 2.0, "--top-p", 0.9, "--seed", 3)
    options = {"max_new_tokens": 5, "temperature": 2.0, "top_p": 0.9, "seed": 3}
    made = as_json("generate", "lm", "the cat", *drawn)["text"]
    assert made == og.language.generate("lm", "the cat", **options)
    assert made != og.language.generate("lm", "the cat", max_new_tokens=5)


def test_adapters_and_chats(tmp_path):
    options = ("--lora", "v", "--epochs", 1, "--validation", 0, "--no-curves", "-o", "out")
    succeed("train", "lm", "chats.jsonl", *LOSS, *options)
    assert not os.path.exists("out.png")
    assert any("lora" in row.name for row in og.trainable("out/model.onnx"))
    succeed("merge", "out", "-o", "merged")
    assert [row.name for row in og.trainable("merged/model.onnx")] == ["w", "v"]
    assert sorted(os.listdir("merged")) == sorted(os.listdir("lm"))
    assert og.language.generate("merged", "the cat", 3) == og.language.generate("out", "the cat", 3)
    assert "not empty" in refusal("merge", "out", "-o", "merged")
    whole = ("--overwrite", "--no-completion-only")
    done = succeed("train", "lm", "chats.jsonl", *LOSS, *options, *whole)
    every = re.search(r"(\d+) tokens, of which (\d+)", done.stderr)
    assert int(every[1]) == int(every[2]) + 1


def test_a_file_has_the_tokenizer_beside_it_or_a_named_one(tmp_path):
    options = ("--epochs", 1, "--no-curves", "-o", "new.onnx", "--overwrite")
    succeed("train", "lm/model.onnx", "texts.txt", *LOSS, *options)
    os.rename("lm/model.onnx", "alone.onnx")
    alone = ("train", "alone.onnx", "texts.txt", *LOSS, *options)
    assert_names(refusal(*alone), "MODEL ... --tokenizer")
    succeed(*alone, "--tokenizer", "lm")


def test_an_adapter_beside_its_base(tmp_path):
    options = ("--lora", "v", "--epochs", 3, "--lr", 0.1, "--prompt", "the cat", "--no-curves")
    for name in ("one", "two"):
        own = ("--adapter", name, "--seed", len(name), "-o", "out", "--overwrite")
        (sample,) = as_json("train", "lm", "texts.txt", *LOSS, *options, *own)["samples"]
    assert sorted(os.listdir("out/adapters")) == ["one.onnx_adapter", "two.onnx_adapter"]
    assert as_json("generate", "out", "the cat", "--adapter", "two") == sample
    assert as_json("generate", "out", "the cat") == as_json("generate", "lm", "the cat")
    assert_names(
        refusal("train", "lm", "texts.txt", *LOSS, "--adapter", "x"), "--adapter ... --lora"
    )


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("lm", "texts.txt", "-o", "-"), "--output - ... folder"),
        (("lm", "texts.txt", "-o", "old"), "'old' ... not empty"),
        (("lm", "texts.txt", "-o", "old", "--overwrite"), "language model ... overwritten"),
        (("lm", "texts.txt", "-o", "lm/new"), "lm/new ... folder ... copied"),
        (("lm", "texts.txt", "--lora", "v", "--adapter", "../x"), "../x ... plain file name"),
        (("lm", "broken.jsonl"), "line 2 ... 'broken.jsonl' ... JSON"),
        (("lm", "empty.txt"), "'empty.txt' ... no text"),
        (("lm", "texts.txt", "--max-length", 65), "--max-length 65 ... 64 tokens"),
        (("old", "texts.txt"), "'old' ... no language"),
        (("lm", "texts.txt", "--completion-only"), "--completion-only"),
        (
            ("lm", "rows.csv", "--target", "y", "--prompt", "x", "--validation", 0),
            "--prompt ... no texts",
        ),
    ],
)
def test_misuse_gives_one_line(tmp_path, arguments, parts):
    (tmp_path / "broken.jsonl").write_text('{"text": "x"}\n{"text": \n')
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "rows.csv").write_text("x,y\n1,2\n")
    os.mkdir("old")
    (tmp_path / "old" / "mine.txt").write_text("mine")
    done = run_command("train", *arguments, *LOSS)
    assert done.exit_code == 2
    [line] = done.stderr.splitlines()
    assert_names(line, parts)
    assert os.listdir("old") == ["mine.txt"]


def test_other_commands_take_a_folder():
    succeed("trainable", "lm")
    assert "`onnxgrad generate`" in refusal("predict", "lm", "texts.txt")
    assert "folder" in refusal("generate", "lm/model.onnx", "x")
    succeed("train", "lm", "texts.txt", *LOSS, "--dry-run")
    assert not os.path.exists("trained")
