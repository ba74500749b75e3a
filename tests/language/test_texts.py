"""Texts as batches: tokens, labels, order, and what is refused."""

import json
import re
import warnings
from itertools import chain

import numpy as np
import onnx
import pytest
from language_models import SENTENCES, bpe

import onnxgrad as og
from onnxgrad.data.arrays import DataError
from onnxgrad.language.chat import ChatTemplate
from onnxgrad.language.tokenizer import Tokenizer
from tests.support.errors import naming
from tests.support.running import in_sweep
from tests.support.text_models import CHAT, IM, bpe_tokenizer, text_beginnings, token_model

pytest.importorskip("tokenizers")

THINKING = IM.replace(  # as Qwen3: only the last turn has its thoughts
    "{{ m.content }}",
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}",
)
MARKED = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}
{% else %}{{ m.content }}<|im_end|>{% endif %}
{% endfor %}"""
LLAMA = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = "
    "'<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim "
    "+ '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}"
    "{{ content }}{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant"
    "<|end_header_id|>\n\n' }}{% endif %}"
)
QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "<|im_end|>\\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or \
(message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not "
    "supported') }}{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != "
    "(loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = "
    "message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + "
    "'<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}"
    "{% endif %}"
)
PHI = (
    "{% for message in messages %}{% if message['role'] == 'system' %}{{'<|system|>\n' + "
    "message['content'] + '<|end|>\n'}}{% elif message['role'] == 'user' %}{{'<|user|>\n' + "
    "message['content'] + '<|end|>\n'}}{% elif message['role'] == 'assistant' %}{{'<|assistant|>\n'"
    " + message['content'] + '<|end|>\n'}}{% endif %}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)


def rows_of_texts(source, *arguments, **options):
    """Return ids and labels of each row, in order, without padding."""
    reader = og.language.texts(source, *arguments, **options)
    found = []
    for X, labels, _ in reader.batches(2, None, 0):
        for ids, mask, own in zip(X["input_ids"], X["attention_mask"], labels, strict=True):
            assert (own[~mask] == -100).all()
            found.append((ids[mask].tolist(), own[mask].tolist()))
    return found


def learned_text(tok: Tokenizer, row) -> str:
    """Return the text of the tokens that are learned."""
    return tok.backend.decode([i for i in row[1] if i != -100], skip_special_tokens=False)


# -- tokens and labels --------------------------------------------------------------------------


def test_texts_end_and_prompts_are_not_learned():
    tok = bpe_tokenizer()
    prompt, completion = "what is the capital of France?", " It is\n\n Paris. "
    made = rows_of_texts(
        [SENTENCES[0], {"text": "a</s>"}, {"prompt": prompt, "completion": completion}], tok
    )
    ids, labels = made[0]
    assert ids == labels == [*tok.backend.encode(SENTENCES[0]).ids, tok.eos_id]
    assert made[1][0] == tok.backend.encode("a</s>").ids
    ids, labels = made[2]
    assert ids == [*tok.backend.encode(prompt + completion).ids, tok.eos_id]
    assert learned_text(tok, made[2]) == completion + "</s>"
    count = len(tok.backend.encode(prompt).ids)
    assert labels[:count] == [-100] * count
    whole = {"prompt": prompt, "completion": completion}
    (all_learned,) = rows_of_texts([whole], tok, completion_only=False)
    assert all_learned == (ids, ids)


def test_trimmed_offsets_do_not_hide_spaces():
    from tokenizers import processors

    tok = bpe_tokenizer()
    tok.backend.post_processor = processors.ByteLevel(trim_offsets=True)
    completion = "  \n \n it   is  "
    (row,) = rows_of_texts([{"prompt": "what", "completion": completion}], tok)
    assert learned_text(tok, row) == completion + "</s>"


def test_a_token_across_the_edge_is_learned_and_said():
    with pytest.warns(UserWarning, match=naming("1 rows", "prompt")):
        (row,) = rows_of_texts([{"prompt": "the ca", "completion": "t sat"}], bpe_tokenizer())
    assert learned_text(bpe_tokenizer(), row) in ("at sat</s>", " cat sat</s>")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (IM, "the cat sat<|im_end|>\njumps over\nit<|im_end|>\n"),
        (MARKED, "the cat sat<|im_end|>jumps over\nit<|im_end|>"),
        (THINKING, "the cat sat<|im_end|>\n<think>\n\n</think>\n\njumps over\nit<|im_end|>\n"),
        (QWEN, "the cat sat<|im_end|>\njumps over\nit<|im_end|>\n"),
        (LLAMA, "the cat sat<|eot_id|>jumps over\nit<|eot_id|>"),
        (GEMMA, "the cat sat<end_of_turn>\njumps over\nit<end_of_turn>\n"),
        (PHI, "the cat sat<|end|>\njumps over\nit<|end|>\n</s>"),
    ],
    ids=["im", "marked", "thinking", "qwen", "llama", "gemma", "phi"],
)
def test_only_the_assistant_is_learned(template, expected):
    tok = bpe_tokenizer(template)
    (row,) = rows_of_texts([{"messages": CHAT}], tok)
    assert learned_text(tok, row) == expected
    assert tok.backend.decode(row[0], skip_special_tokens=False) == tok.chat_template.render(CHAT)
    (row,) = rows_of_texts([{"prompt": CHAT[:3], "completion": CHAT[3:]}], tok)
    assert learned_text(tok, row) in expected
    assert "sat" not in learned_text(tok, row)
    (row,) = rows_of_texts([{"messages": CHAT}], tok, completion_only=False)
    assert row[0] == row[1]


@pytest.mark.parametrize(
    "template", [LLAMA, QWEN, GEMMA, PHI], ids=["llama", "qwen", "gemma", "phi"]
)
@pytest.mark.parametrize("prompt", [True, in_sweep(False)])
def test_templates_render_as_in_transformers(template, prompt):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe(), bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    theirs.chat_template = template
    messages = CHAT[:3] if prompt else CHAT
    tools = [{"type": "function", "function": {"name": "f<é>", "parameters": {}}}]
    for more in ({}, {"tools": tools}):
        expected = theirs.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=prompt, **more
        )
        ours = bpe_tokenizer(template).chat_template.render(messages, prompt, **more)
        assert ours == expected


def test_templates_are_in_a_sandbox_and_may_refuse():
    with pytest.raises(ValueError, match="System role"):
        ChatTemplate(GEMMA, {"bos": ""}).render([{"role": "system", "content": "x"}])
    for attack in (
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__['os'] }}",
    ):
        with pytest.raises(ValueError, match=naming("chat template", "refuses")):
            ChatTemplate(attack).render(CHAT)
    with pytest.raises(ValueError, match=naming("chat template", "jinja2")):
        ChatTemplate("{% for")


@pytest.mark.parametrize(
    ("processor", "around"),
    [
        (True, {}),
        (False, {"add_eos_token": True}),
        *(in_sweep(p, {"add_bos_token": True}) for p in (False, True)),
    ],
)
def test_a_folder_encodes_as_transformers(around, processor, tmp_path):
    transformers = pytest.importorskip("transformers")
    from tokenizers import processors

    backend = bpe()
    if processor:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
        )
    backend.enable_truncation(3)
    backend.enable_padding(length=9)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | around))
    theirs, ours = (
        transformers.AutoTokenizer.from_pretrained(tmp_path),
        Tokenizer.from_folder(tmp_path),
    )
    found = [ids.tolist() for ids, _ in ours.encode(SENTENCES)]
    assert found == [theirs(text)["input_ids"] for text in SENTENCES]
    assert (ours.bos_id, ours.eos_id, ours.pad_id) == (0, 1, 2)
    assert rows_of_texts(SENTENCES, theirs) == rows_of_texts(SENTENCES, ours)


# -- rows ---------------------------------------------------------------------------------------


def test_long_rows_are_cut_and_counted():
    with pytest.warns(UserWarning, match=naming("3 texts", "max_length=12")):
        made = rows_of_texts(SENTENCES, bpe_tokenizer(), 12)
    lengths = [len(ids) for ids, _ in made]
    assert max(lengths) == 12
    with pytest.raises(DataError, match=naming("row 0", "max_length=4")):
        og.language.texts([{"prompt": SENTENCES[0], "completion": " x"}], bpe_tokenizer(), 4)


def test_packing_loses_nothing():
    tok = bpe_tokenizer()
    prompt = {"prompt": "the cat", "completion": " sat"}
    single = rows_of_texts([*SENTENCES, prompt], tok)
    packed = rows_of_texts([*SENTENCES, prompt], tok, 8, packing=True)
    for part in (0, 1):
        assert [*chain(*(row[part] for row in packed))] == [*chain(*(row[part] for row in single))]
    assert {len(row[0]) for row in packed[:-1]} == {8}
    stream = rows_of_texts(lambda: iter([*SENTENCES, prompt]), tok, 8, packing=True)
    assert stream == packed


def test_sources_hold_the_same(tmp_path):
    pandas, pyarrow = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    from pyarrow import parquet

    tok = bpe_tokenizer(IM)
    lines = [*SENTENCES[:3], "x y"]
    expected = rows_of_texts(lines, tok)
    (tmp_path / "a.txt").write_text("\n\n".join(lines) + "\n", encoding="utf-8-sig")
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in lines) + "\n\n")
    (tmp_path / "a.json").write_text(json.dumps([{"text": t} for t in lines]))
    table = pyarrow.table({"text": lines})
    parquet.write_table(table, tmp_path / "a.parquet")
    frame = pandas.DataFrame({"text": lines})
    same = [tmp_path / f"a.{kind}" for kind in ("txt", "jsonl", "json", "parquet")]
    same += [table, frame, frame["text"], frame.to_dict("list"), lambda: lines]
    for source in same:
        assert rows_of_texts(source, tok) == expected
    assert rows_of_texts(frame.rename(columns={"text": "said"}), tok, column="said") == expected
    halves = [tmp_path / "a.txt", tmp_path / "a.jsonl"]
    assert rows_of_texts(halves, tok) == expected + expected
    (whole,) = rows_of_texts(tmp_path / "a.txt", tok, by_line=False)
    assert whole[0] == rows_of_texts(["\n\n".join(lines) + "\n"], tok)[0][0]
    chats = pandas.DataFrame({"messages": [CHAT, CHAT[:2]]})
    assert rows_of_texts(chats, tok) == rows_of_texts(
        [{"messages": CHAT}, {"messages": CHAT[:2]}], tok
    )
    parquet.write_table(pyarrow.Table.from_pandas(chats), tmp_path / "chats.parquet")
    assert rows_of_texts(tmp_path / "chats.parquet", tok) == rows_of_texts(chats, tok)


def test_datasets_of_hugging_face(tmp_path):
    datasets = pytest.importorskip("datasets")
    tok = bpe_tokenizer()
    made = datasets.Dataset.from_dict({"text": SENTENCES})
    assert rows_of_texts(made, tok) == rows_of_texts(SENTENCES, tok)
    stream = og.language.texts(made.to_iterable_dataset(), tok)
    assert rows_of_texts(made.to_iterable_dataset(), tok) == rows_of_texts(SENTENCES, tok)

    def passed(seed, skip=0):
        return [X["input_ids"].tolist() for X, _, _ in stream.batches(1, seed, skip)]

    assert passed(3) == passed(3) != passed(4)
    assert passed(3, 2) == passed(3)[2:]


# -- training -----------------------------------------------------------------------------------


def token_trainer(**options) -> og.Trainer:
    return og.Trainer(
        token_model(),
        {"logits": "cross_entropy"},
        loss_options={"logits": {"shift": True, "axis": -1, "ignore_index": -100}},
        learning_rate=0.03,
        **options,
    )


def test_perplexity_is_of_all_tokens():
    own, data = (
        token_trainer(metrics=["perplexity"]).fit(
            og.language.texts(text_beginnings(), bpe_tokenizer())
        ),
        text_beginnings(),
    )
    sums, count = 0.0, 0
    for ids, labels in rows_of_texts(data, bpe_tokenizer()):
        logits = own.predict({"input_ids": [ids], "attention_mask": [[1] * len(ids)]})[0, :-1]
        logits = logits.astype(np.float64)
        p = logits[np.arange(len(ids) - 1), ids[1:]] - np.log(np.exp(logits).sum(axis=-1))
        sums, count = sums - p.sum(), count + len(labels) - 1
    for size in (1, 5):
        result = own.evaluate(og.language.texts(data, bpe_tokenizer()), batch_size=size)
        assert result["loss"] == pytest.approx(sums / count, rel=1e-5)
        assert result["perplexity"] == pytest.approx(np.exp(sums / count), rel=1e-5)


def test_a_training_goes_on_bit_for_bit(tmp_path):
    def fit(epochs, **more):
        made = token_trainer(
            callbacks=[og.Checkpoint(tmp_path / "c", every_steps=3)] if more else []
        )
        return made.fit(
            og.language.texts(text_beginnings(), bpe_tokenizer()),
            epochs=epochs,
            batch_size=4,
            **more,
        )

    whole, _ = fit(3), fit(2, resume=tmp_path / "c")
    resumed = fit(3, resume=tmp_path / "c")
    assert resumed.state.step == whole.state.step == 18
    for name, weight in whole.state.weights.items():
        np.testing.assert_array_equal(weight, resumed.state.weights[name])
    other = og.language.texts([*text_beginnings()[:-1], "else"], bpe_tokenizer())
    with pytest.raises(ValueError, match="data"):
        token_trainer().fit(other, epochs=4, batch_size=4, resume=tmp_path / "c")


def test_a_share_is_held_out():
    own = token_trainer().fit(
        og.language.texts(text_beginnings(), bpe_tokenizer()),
        validation=0.2,
        epochs=2,
        batch_size=4,
    )
    assert own.state.step == 2 * 5  # of 18 rows
    order = np.random.default_rng([0, 1]).permutation(23)
    held = [text_beginnings()[i] for i in np.sort(order[:5])]
    loss = own.evaluate(og.language.texts(held, bpe_tokenizer()))["loss"]
    assert own.history[-1]["validation_loss"] == pytest.approx(loss, rel=1e-6)
    with pytest.raises(ValueError, match="in memory"):
        token_trainer().fit(
            og.language.texts(lambda: text_beginnings(), bpe_tokenizer()), validation=0.2
        )


def test_a_stream_trains_and_tells_once():
    stream = og.language.texts(lambda: ["", *text_beginnings()], bpe_tokenizer(), 12)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        own = token_trainer().fit(stream, epochs=3, batch_size=4)
    numbered = [re.sub(r"\d+", "n", str(w.message)) for w in told]
    texts = sorted(message for message in numbered if "n texts" in message)
    assert len(texts) == 2  # what is left out, and what is cut
    assert "max_length=n" in texts[1]
    assert own.state.step == 18


# -- misuse -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("record", "parts"),
    [
        ({"input_ids": [1, 2], "labels": [1, 2, 3]}, ["2 input_ids", "3 labels"]),
        ({"input_ids": ["a"]}, ["whole numbers"]),
        ({"content": "x"}, ["['content']", "'text'", "'prompt'", "'completion'"]),
        ({"text": None}, ["'text'", "None"]),
        ({"prompt": "x", "completion": 3}, ["'completion'", "3"]),
        (5, ["int", "text"]),
        ({"messages": CHAT}, ["messages", "chat template"]),
    ],
)
def test_records_of_other_forms(record, parts):
    with pytest.raises(DataError, match=naming("row 1", *parts)):
        og.language.texts(["first", record], bpe_tokenizer())


def test_chats_of_other_forms():
    tok = bpe_tokenizer(IM)
    with pytest.raises(DataError, match=naming("row 0", "assistant")):
        og.language.texts([{"messages": CHAT[:1]}], tok)
    with pytest.raises(DataError, match=naming("'role'", "'content'")):
        og.language.texts([{"messages": [{"from": "human", "value": "x"}]}], tok)


def test_files_of_other_forms(tmp_path):
    tok = bpe_tokenizer()
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n\n{"text": \n')
    with pytest.raises(DataError, match=naming("line 3", "a.jsonl", "JSON")):
        og.language.texts(tmp_path / "a.jsonl", tok)
    for text in ("", "\n \n"):
        (tmp_path / "b.txt").write_text(text)
        with pytest.raises(DataError, match=naming("b.txt", "text")):
            og.language.texts(tmp_path / "b.txt", tok)
    (tmp_path / "c.txt").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(DataError, match=naming("c.txt", "UTF-8")):
        og.language.texts(tmp_path / "c.txt", tok)
    with pytest.raises(DataError, match=naming("No such", "texts")):
        og.language.texts("Once upon a time", tok)


def test_options_of_other_models(tmp_path):
    tok = bpe_tokenizer()
    for most, message in ((1, "a row needs 2 tokens"), (None, "packing=True needs max_length=")):
        with pytest.raises(ValueError, match=message):
            og.language.texts(SENTENCES, tok, most, packing=most is None)
    with pytest.raises(DataError, match="and completion_only=True"):
        og.language.texts(SENTENCES, tok, completion_only=True)
    onnx.save(token_model(), tmp_path / "model.onnx")
    config = {"vocab_size": 200, "max_position_embeddings": 16}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tok.backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match=naming("tokenizer", "200")):
        og.language.texts(SENTENCES, tmp_path)
    with pytest.raises(ValueError, match=naming("max_length=32", "16 tokens")):
        og.language.texts(SENTENCES, og.load_folder(tmp_path), 32)
    with pytest.raises(ValueError, match=r"a tokenizer is .* not int"):
        og.language.texts(SENTENCES, 5)


def test_without_the_library(monkeypatch, tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"pip install 'onnxgrad\[text\]'"):
        og.language.texts(SENTENCES, tmp_path)
