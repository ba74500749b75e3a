"""What the code of pages reads: small models and data under the names that a reader would have.

Importing it changes into a new folder, so that no page writes among the sources.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx

folder = tempfile.TemporaryDirectory()
os.chdir(folder.name)
Path("data").symlink_to(Path(__file__).parents[2] / "data")
rng = np.random.default_rng(0)

VISION = """
    <ir_version: 9, opset_import: ["": 20]>
    vision (float[N,1,8,8] image) => (float[N,2] logits) {
        c1 = Conv <pads = [1,1,1,1]> (image, layer1.weight)
        r1 = Relu(c1)
        c4 = Conv <pads = [1,1,1,1]> (r1, layer4.weight)
        r4 = Relu(c4)
        f = ReduceMean <keepdims = 0> (r4, axes)
        logits = Gemm <transB = 1> (f, fc.weight, fc.bias)
    }
"""
PHOTOS = VISION.replace("1,8,8", "3,32,32")
ENCODER = """
    <ir_version: 9, opset_import: ["": 20]>
    encoder (int64[N,T] input_ids, int64[N,T] attention_mask) => (float[N,T,8] last_hidden_state) {
        e = Gather(embedding.weight, input_ids)
        d = MatMul(e, dense.weight)
        last_hidden_state = Tanh(d)
    }
"""
ATTENTION = """
    <ir_version: 9, opset_import: ["": 20]>
    attention (float[N,T,8] x) => (float[N,2] logits) {
        q = MatMul(x, layer.0.query.weight)
        k = MatMul(x, layer.0.key.weight)
        v = MatMul(x, layer.0.value.weight)
        t = Transpose <perm = [0,2,1]> (k)
        s = MatMul(q, t)
        p = Softmax(s)
        a = MatMul(p, v)
        m = ReduceMean <keepdims = 0> (a, axis)
        logits = MatMul(m, fc.weight)
    }
"""
SOUND = """
    <ir_version: 9, opset_import: ["": 20]>
    sound (float[N,80,frames] mel) => (float[N,2] logits) {
        m = ReduceMean <keepdims = 0> (mel, last)
        logits = MatMul(m, fc.weight)
    }
"""
LANGUAGE = """
    <ir_version: 9, opset_import: ["": 20]>
    language (int64[N,T] input_ids) => (float[N,T,300] logits) {
        one = Constant <value_ints = [1]> ()
        e = Gather(embedding.weight, input_ids)
        t = Transpose <perm = [1,0,2]> (e)
        g, h = GRU <hidden_size = 48> (t, gru.w, gru.r)
        s = Squeeze(g, one)
        u = Transpose <perm = [1,0,2]> (s)
        logits = MatMul(u, head.weight)
    }
"""
LINE = """
    <ir_version: 9, opset_import: ["": 20]>
    line (float[N,4] x) => (float[N,1] y) { h = MatMul(x, body)  a = Tanh(h)  y = MatMul(a, head) }
"""

HOUSES = """
    <ir_version: 9, opset_import: ["": 20]>
    houses (float[N,3] x) => (float[N,1] price)
    <float[3,1] slope = {0.0, 0.0, 0.0}, float[1] intercept = {0.0}>
    { a = MatMul(x, slope)  price = Add(a, intercept) }
"""

BOWL = """
    <ir_version: 9, opset_import: ["": 20]>
    bowl (float[1,2] x) => (float[1,2] y) { h = MatMul(x, body)  a = Tanh(h)  y = MatMul(a, head) }
"""


def model(text: str, **shapes: tuple[int, ...]) -> onnx.ModelProto:
    """Return a model with random weights of these shapes, whose names have `.` for `__`."""
    names = {name.replace("__", "."): shape for name, shape in shapes.items()}
    for name in names:
        text = text.replace(name, name.replace(".", "__"))
    proto = onnx.parser.parse_model(text)
    for node in proto.graph.node:
        node.input[:] = [name.replace("__", ".") for name in node.input]
    arrays = {name: rng.normal(0, 0.3, shape).astype("f4") for name, shape in names.items()}
    arrays |= {"axes": np.array([2, 3]), "axis": np.array([1]), "last": np.array([2])}
    read = {name for node in proto.graph.node for name in node.input}
    kept = [onnx.numpy_helper.from_array(arrays[name], name) for name in arrays if name in read]
    proto.graph.initializer.extend(kept)
    return proto


def vision(text: str = VISION, channels: int = 1) -> onnx.ModelProto:
    """Return a small CNN with two classes."""
    layers = {"layer1__weight": (4, channels, 3, 3), "layer4__weight": (8, 4, 3, 3)}
    return model(text, **layers, fc__weight=(2, 8), fc__bias=(2,))


def encoder() -> onnx.ModelProto:
    """Return a small encoder of token ids."""
    return model(ENCODER, embedding__weight=(100, 8), dense__weight=(8, 8))


def attention() -> onnx.ModelProto:
    """Return a classifier of sequences with one head of attention."""
    names = ("query", "key", "value")
    return model(ATTENTION, **{f"layer__0__{n}__weight": (8, 8) for n in names}, fc__weight=(8, 2))


def language_model(folder: str, texts: list[str]) -> None:
    """Write a small language model as optimum lays it out, with a tokenizer for these texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    sizes = {"embedding__weight": (300, 32), "gru__w": (1, 144, 32), "gru__r": (1, 144, 48)}
    Path(folder).mkdir()
    onnx.save(model(LANGUAGE, **sizes, head__weight=(48, 300)), Path(folder, "model.onnx"))
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    words.train_from_iterator(texts, trainer)
    words.save(str(Path(folder, "tokenizer.json")))
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    special = {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>", "chat_template": template}
    config = {"vocab_size": 300, "eos_token_id": 1, "max_position_embeddings": 64}
    for name, content in (("config.json", config), ("tokenizer_config.json", special)):
        Path(folder, name).write_text(json.dumps(content))


def houses() -> None:
    """Write `houses.onnx`, a linear model of three columns, and tables to train, test, predict."""
    proto = onnx.parser.parse_model(HOUSES)
    onnx.save(proto, "houses.onnx")
    for name, count in (("houses.csv", 200), ("test.csv", 50), ("new.csv", 5)):
        table = rng.normal(size=(count, 3))
        price = table @ [3.0, 2.0, -1.0] + 0.1 * rng.normal(size=count)
        columns = ["rooms", "area", "age", "price"]
        made = np.column_stack([table, price])
        if name == "new.csv":
            columns, made = columns[:3], made[:, :3]
        np.savetxt(name, made, delimiter=",", header=",".join(columns), comments="", fmt="%.4f")


def bowl() -> onnx.ModelProto:
    """Return a function of two numbers, in float32, for solvers."""
    return model(BOWL, body=(2, 3), head=(3, 2))


def rows(*shape: int, classes: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """Return random data, and labels that depend on their sign."""
    X = rng.normal(size=shape).astype(np.float32)
    return X, (X.reshape(len(X), -1)[:, :3].sum(axis=1) > 0).astype(np.int64) * (classes - 1)


def photos(root: str = "photos") -> None:
    """Write a folder of small photographs for each of two classes."""
    from PIL import Image

    for i, name in enumerate(("cat", "dog")):
        Path(root, name).mkdir(parents=True)
        for k in range(8):
            pixels = rng.integers(100 * i, 100 * i + 150, size=(40, 48, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(Path(root, name, f"{k}.png"))


def digits(root: str = "digits") -> None:
    """Write the images of `data/digits.parquet`, a folder a class."""
    from PIL import Image
    from pyarrow import parquet

    table = parquet.read_table("data/digits.parquet").to_pydict()
    for i, label in enumerate(table["label"]):
        pixels = np.array([table[f"pixel_{k}"][i] for k in range(64)]).reshape(8, 8)
        file = Path(root, str(label), f"{i:04d}.png")
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((255 * pixels).astype(np.uint8)).save(file)


def publish(page: str, text: str) -> Any:
    """Put a page of HTML beside those of the site; return a link to it with this text."""
    from IPython.display import HTML

    name = f"live/{Path(page).name}"
    extra = Path(__file__).parents[2] / "build" / "extra"
    if (extra / "live").is_dir():  # which the build of the site makes
        shutil.copy(page, extra / name)
    return HTML(f'<a href="{name}">{text}</a>')
