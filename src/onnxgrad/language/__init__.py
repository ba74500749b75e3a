"""Language models: their folders, tokenizers and texts, encoder-decoders, and generation.

`folders.py` reads the folders of onnxruntime-genai and optimum, `save.py` writes them. Texts are
records (`records.py`), which a tokenizer (`tokenizer.py`, `chat.py`) makes tokens and labels
(`encoding.py`) for the readers in `text_readers.py`, `classified_texts.py`, `word_labels.py` and
`text_pairs.py`. `generation.py` continues prompts; `encoder_decoder.py` joins two files.
"""

from onnxgrad.lazy_names import offer_names

__getattr__, __dir__, __all__ = offer_names(__name__, __file__)
