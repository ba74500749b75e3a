"""Small random language models, as onnxruntime-genai's builder writes them."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

SENTENCES = [
    "the cat sat on the mat",
    "a quick brown fox jumps over the lazy dog",
    "what is the capital of France? It is Paris.",
    "onnx models are graphs of operators\n\nand weights",
]
FAMILIES = ["llama", "qwen", "phi", "gemma"]
SPECIAL = ["<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>"]


def bpe(size: int = 320, texts: Sequence[str] = SENTENCES):
    """Return a tokenizer as that of GPT-2, of `tokenizers`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    return made


def configurations(vocab_size: int, hidden: int = 64, layers: int = 2) -> dict:
    """Return small configurations of transformers by family: (configuration, model)."""
    import transformers as t

    common = {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "tie_word_embeddings": False,
    }
    own = {"head_dim": hidden // 4}
    return {
        "llama": (t.LlamaConfig(**common, **own), t.LlamaForCausalLM),
        "qwen": (t.Qwen2Config(**common), t.Qwen2ForCausalLM),
        "phi": (
            t.Phi3Config(**common, original_max_position_embeddings=256),  # else of two caches
            t.Phi3ForCausalLM,
        ),
        "gemma": (t.Gemma2Config(**common, **own, sliding_window=64), t.Gemma2ForCausalLM),
    }


def build(
    folder: Path,
    family: str = "llama",
    precision: str = "fp32",
    texts: Sequence[str] = SENTENCES,
    **sizes: int,
) -> Path:
    """Write `folder/hf`, a random model of transformers, and what the builder makes of it.

    Returns the folder of genai, `folder/<precision>`.
    """
    import torch
    from transformers import PreTrainedTokenizerFast

    backend = bpe(texts=texts)
    torch.manual_seed(0)
    config, model = configurations(backend.get_vocab_size(), **sizes)[family]
    model(config).save_pretrained(folder / "hf")
    PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(folder / "hf")
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", folder / "hf"]
    device = "cuda" if precision == "fp16" else "cpu"  # what the builder writes halves for
    command += ["-o", folder / precision, "-p", precision, "-e", device, "-c", folder / "cache"]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return folder / precision
