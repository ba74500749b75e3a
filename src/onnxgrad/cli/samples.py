"""Texts that language models generate: `onnxgrad generate`, and samples of a training."""

from __future__ import annotations

from collections.abc import Sequence

from onnxgrad.cli.command_options import GenerateOptions
from onnxgrad.cli.console import complain, print_json, say
from onnxgrad.cli.job import Job
from onnxgrad.cli.model_files import folder_of
from onnxgrad.errors import first_line
from onnxgrad.language.folders import load_folder
from onnxgrad.language.generation import generate as go_on
from onnxgrad.language.text_readers import Texts


def generate(options: GenerateOptions) -> None:
    """Print how a model goes on with a text."""
    folder = folder_of(options.model)
    if folder is None:
        raise ValueError(f"MODEL must be the folder of a language model, not {options.model!r}")
    text = go_on(
        load_folder(folder),
        options.text,
        options.max_new_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        seed=options.seed,
        adapter=options.adapter,
    )
    if options.json:
        print_json({"prompt": options.text, "text": text})
    else:
        say(text)


def check_prompts(job: Job, prompts: Sequence[str]) -> list[str]:
    """Return the prompts of `--prompt`; the recorder of a training gets them, too.

    Raises:
        ValueError: the data are no texts.
    """
    texts = job.task.data
    if prompts and not isinstance(texts, Texts):
        raise ValueError("--prompt is for language models, and the data are no texts")
    for callback in job.trainer._job.callbacks.callbacks:
        if prompts and callback.key == "Recorder":
            callback.prompts, callback.tokenizer = list(prompts), texts.tokenizer
    return list(prompts)


def sample(job: Job, prompts: Sequence[str]) -> list[tuple[str, str]]:
    """Return prompts, and how the trained model goes on with them; none if that fails."""
    try:
        new = go_on(job.trainer, prompts, tokenizer=job.task.data.tokenizer)
    except Exception as e:  # the trained model is written, which matters more
        complain(f"no text is generated: {first_line(e)}")
        return []
    return list(zip(prompts, new, strict=True))
