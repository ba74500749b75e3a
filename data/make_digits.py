"""Write digits.parquet: the 1,797 images of scikit-learn's digits, one pixel a column."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from sklearn.datasets import load_digits

digits = load_digits()
pixels = (digits.data / 16).astype("float32")
columns = {f"pixel_{i}": pixels[:, i] for i in range(pixels.shape[1])}
columns["label"] = digits.target.astype("int64")
pq.write_table(pa.table(columns), Path(__file__).with_name("digits.parquet"), compression="zstd")
