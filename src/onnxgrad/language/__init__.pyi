"""Readers of texts, generation, encoders and decoders, and folders of language models."""

from onnxgrad.language.encoder_decoder import (
    greedy_decode as greedy_decode,
    join_encoder_decoder as join_encoder_decoder,
    shift_right as shift_right,
)
from onnxgrad.language.encoder_decoder_files import (
    split_encoder_decoder as split_encoder_decoder,
)
from onnxgrad.language.folders import (
    ModelFolder as ModelFolder,
    load_folder as load_folder,
)
from onnxgrad.language.generation import (
    generate as generate,
)
from onnxgrad.language.log_probs import (
    ctc_decode as ctc_decode,
    sequence_log_probs as sequence_log_probs,
)
from onnxgrad.language.save import (
    save_folder as save_folder,
)
from onnxgrad.language.text_pairs import (
    paired_texts as paired_texts,
)
from onnxgrad.language.text_readers import (
    texts as texts,
)
from onnxgrad.language.word_labels import (
    labeled_texts as labeled_texts,
)
