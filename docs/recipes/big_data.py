"""
Data larger than memory
=======================

Parquet files are read while the model trains: memory holds some tens of thousands of rows at a
time, whatever the size of the files. Here, a folder has four files; it could as well have
thousands.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import onnx
import pyarrow as pa
from pyarrow import parquet

import onnxgrad as og

rng = np.random.default_rng(0)
truth = np.array([1.0, -2.0, 3.0])
Path("rows").mkdir(exist_ok=True)
for i in range(4):
    x = rng.normal(size=(50_000, 3)).astype(np.float32)
    price = (x @ truth + 0.1 * rng.normal(size=len(x))).astype(np.float32)
    table = pa.table({"a": x[:, 0], "b": x[:, 1], "c": x[:, 2], "price": price})
    parquet.write_table(table, f"rows/{i}.parquet", row_group_size=10_000)

# %%
# Here, ``columns`` are those of the input, in its order; ``y`` is the label. Rows are shuffled
# within ``shuffle_rows``, and so are the row groups of the files.

model = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 20]>
    f (float[N,3] x) => (float[N,1] y) <float[3,1] w = {0.0, 0.0, 0.0}> { y = MatMul(x, w) }
""")
data = og.data.arrow_dataset("rows", y="price", columns=["a", "b", "c"], shuffle_rows=20_000)
trainer = og.Trainer(
    model, "mse", optimizer="sgd", learning_rate=0.01, callbacks=[og.callbacks.Timing()]
)
trainer.fit(data, epochs=3, batch_size=256)
print(trainer.state.weights["w"].ravel(), trainer.history[-1])
np.testing.assert_allclose(trainer.state.weights["w"].ravel(), truth, atol=0.01)

# %%
plt.semilogy([entry["epoch"] for entry in trainer.history], [e["loss"] for e in trainer.history])
plt.xlabel("epoch")
plt.ylabel("loss")
plt.show()
