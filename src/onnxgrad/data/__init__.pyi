"""Readers of data that are larger than memory, tables in files, and transforms of rows."""

from onnxgrad.data.arrow import (
    arrow_dataset as arrow_dataset,
)
from onnxgrad.data.audio import (
    mel_spectrogram as mel_spectrogram,
    resample as resample,
)
from onnxgrad.data.boxes import (
    annotated_images as annotated_images,
    letterbox as letterbox,
)
from onnxgrad.data.class_batches import (
    p_by_k as p_by_k,
)
from onnxgrad.data.image_files import (
    image_size as image_size,
    list_images as list_images,
    open_image as open_image,
)
from onnxgrad.data.image_transforms import (
    center_crop as center_crop,
    normalize as normalize,
    random_colors as random_colors,
    random_crop as random_crop,
    random_flip as random_flip,
    resize as resize,
)
from onnxgrad.data.images import (
    image_folder as image_folder,
)
from onnxgrad.data.masks import (
    masked_images as masked_images,
)
from onnxgrad.data.padding import (
    by_length as by_length,
    pad_sequences as pad_sequences,
)
from onnxgrad.data.readers import (
    IndexedReader as IndexedReader,
    Reader as Reader,
)
from onnxgrad.data.sounds import (
    list_sounds as list_sounds,
    read_wave as read_wave,
    sound_folder as sound_folder,
)
from onnxgrad.data.tables import (
    FileTable as FileTable,
    read_table as read_table,
)
