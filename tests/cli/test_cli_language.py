"""Language models in the shell: a folder in, a folder out."""

import json
import os
import re

import numpy as np
import onnx
import pytest
from language_models import SENTENCES
from typer.testing import CliRunner

import onnxgrad as og
from onnxgrad.cli import app

pytest.importorskip("tokenizers")
from tests.support.text_models import CHAT, IM, bpe_tokenizer, text_beginnings, token_model

LOSS = ("--loss", "causal_lm")


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The folder `lm` with a small model, and files of texts."""
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
    return tmp_path


def trainer() -> og.Trainer:
    return og.Trainer(og.load_folder("lm"), "causal_lm", metrics=["perplexity"])


def test_a_folder_trains_as_in_python(here):
    options = ("--validation", "0", "--epochs", 2, "--batch-size", 8, "--max-length", 12)
    done = run("train", "lm", "texts.jsonl", *LOSS, *options, "--output", "out")
    assert not done.exit_code, done.stderr
    assert "texts are longer than --max-length 12, and cut" in done.stderr
    with pytest.warns(UserWarning, match="longer than max_length=12"):
        data = og.texts("texts.jsonl", og.load_folder("lm"), 12)
    own = trainer().fit(data, epochs=2, batch_size=8)
    new = og.load_folder("out")
    assert sorted(os.listdir("out")) == sorted(os.listdir("lm"))
    for tensor in onnx.load(new.model).graph.initializer:
        np.testing.assert_array_equal(
            onnx.numpy_helper.to_array(tensor), own.state.weights[tensor.name]
        )
    assert os.path.exists("out.png")

    done = run("eval", "out", "texts.jsonl", *LOSS, "--json")
    expected = own.evaluate(og.texts("texts.jsonl", new))
    found = json.loads(done.stdout)
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert found["metrics"] == {"perplexity": pytest.approx(expected["perplexity"], rel=1e-6)}


def test_samples_are_shown_and_recorded(here):
    options = ("--epochs", 1, "--prompt", "the cat", "--prompt", "a dog", "--record", "record")
    done = run("train", "lm", "texts.txt", *LOSS, *options, "--json", "-o", "out")
    assert not done.exit_code, done.stderr
    samples = json.loads(done.stdout)["samples"]
    assert [s["prompt"] for s in samples] == ["the cat", "a dog"]
    assert samples[0]["text"] == og.generate("out", "the cat")
    recorded = json.loads((here / "record" / "run.json").read_text())["samples"]
    assert recorded == [[s["prompt"], s["text"]] for s in samples]
    assert not run("report", "record").exit_code
    assert "How the trained model goes on" in (here / "record" / "report.html").read_text()
    done = run("generate", "out", "the cat", "--json")
    assert json.loads(done.stdout) == samples[0]


def test_adapters_and_chats(here):
    options = ("--lora", "v", "--epochs", 1, "--validation", 0, "--no-curves", "-o", "out")
    done = run("train", "lm", "chats.jsonl", *LOSS, *options)
    assert not done.exit_code, done.stderr
    assert re.search("1 texts of (\\d+) tokens, of which (\\d+) are learned", done.stderr)
    assert not os.path.exists("out.png")
    assert any("lora" in row.name for row in og.trainable("out/model.onnx"))
    assert not run("merge", "out", "-o", "merged").exit_code
    assert [row.name for row in og.trainable("merged/model.onnx")] == ["w", "v"]
    assert sorted(os.listdir("merged")) == sorted(os.listdir("lm"))
    assert og.generate("merged", "the cat", 3) == og.generate("out", "the cat", 3)
    assert "exists, and is not empty" in run("merge", "out", "-o", "merged").stderr
    done = run("train", "lm", "chats.jsonl", *LOSS, *options, "--overwrite", "--no-completion-only")
    every = re.search("of (\\d+) tokens, of which (\\d+) are learned", done.stderr)
    assert int(every[1]) == int(every[2]) + 1


def test_a_file_has_the_tokenizer_beside_it_or_a_named_one(here):
    options = ("--epochs", 1, "-o", "new.onnx", "--overwrite")
    assert not run("train", "lm/model.onnx", "texts.txt", *LOSS, *options).exit_code
    os.rename("lm/model.onnx", "alone.onnx")
    done = run("train", "alone.onnx", "texts.txt", *LOSS, *options)
    assert "MODEL must be the folder of a language model, or --tokenizer name" in done.stderr
    assert not run(
        "train", "alone.onnx", "texts.txt", *LOSS, *options, "--tokenizer", "lm"
    ).exit_code


def test_an_adapter_beside_its_base(here):
    options = ("--lora", "v", "--epochs", 3, "--lr", 0.1, "--prompt", "the cat", "--json")
    for name in ("one", "two"):
        own = ("--adapter", name, "--seed", len(name), "-o", "out", "--overwrite")
        done = run("train", "lm", "texts.txt", *LOSS, *options, *own)
        assert not done.exit_code, done.stderr
    assert sorted(os.listdir("out/adapters")) == ["one.onnx_adapter", "two.onnx_adapter"]
    (sample,) = json.loads(done.stdout)["samples"]
    text = run("generate", "out", "the cat", "--adapter", "two", "--json").stdout
    assert json.loads(text) == sample
    assert run("generate", "out", "the cat").stdout == run("generate", "lm", "the cat").stdout
    done = run("train", "lm", "texts.txt", *LOSS, "--adapter", "x")
    assert "--adapter has no effect without --lora" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("lm", "texts.txt", "-o", "-"),
            "--output - is standard output, and the result is a folder",
        ),
        (("lm", "texts.txt", "-o", "old"), "'old' exists, and is not empty"),
        (("lm", "texts.txt", "-o", "old", "--overwrite"), "only a language model is overwritten"),
        (("lm", "texts.txt", "-o", "lm/new"), "is in the folder that is copied"),
        (("lm", "texts.txt", "--lora", "v", "--adapter", "../x"), "must be a plain name of a file"),
        (("lm", "broken.jsonl"), "line 2 of 'broken.jsonl' is no JSON"),
        (("lm", "empty.txt"), "'empty.txt' has no text to learn"),
        (("lm", "texts.txt", "--max-length", 65), "--max-length 65, and the model takes 64 tokens"),
        (("old", "texts.txt"), "'old' holds no language model: it has neither"),
        (("lm", "texts.txt", "--completion-only"), "and --completion-only learns what follows one"),
        (
            ("lm", "rows.csv", "--target", "y", "--prompt", "x", "--validation", 0),
            "--prompt is for language models, and the data are no texts",
        ),
    ],
)
def test_misuse_gives_one_line(here, arguments, message):
    (here / "broken.jsonl").write_text('{"text": "x"}\n{"text": \n')
    (here / "empty.txt").write_text("")
    (here / "rows.csv").write_text("x,y\n1,2\n")
    os.mkdir("old")
    (here / "old" / "mine.txt").write_text("mine")
    done = run("train", *arguments, *LOSS)
    assert done.exit_code == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert os.listdir("old") == ["mine.txt"]


def test_other_commands_take_a_folder(here):
    assert not run("trainable", "lm").exit_code
    assert "`onnxgrad generate` goes on with prompts" in run("predict", "lm", "texts.txt").stderr
    assert "must be the folder of a language model" in run("generate", "lm/model.onnx", "x").stderr
    assert not run("train", "lm", "texts.txt", *LOSS, "--dry-run").exit_code
    assert not os.path.exists("trained")
