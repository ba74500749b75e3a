"""A folder of Parquet files
=========================

The data are in files that are read while the model trains, with no more than a few row groups in
memory. The result is that of least squares, which numpy computes from all rows at once.
"""

import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import onnx
import pyarrow as pa
from pyarrow import parquet
from rich.console import Console
from rich.table import Table

import onnxgrad as og

# %%
# Eight files of 2500 rows, in row groups of 500.

rng = np.random.default_rng(0)
true = np.array([[2.0], [-1.0], [0.5]])
folder = Path(tempfile.mkdtemp())
parts = []
for number in range(8):
    x = rng.normal(size=(2500, 3))
    price = x @ true + 3 + rng.normal(scale=0.1, size=(2500, 1))
    columns = {"area": x[:, 0], "age": x[:, 1], "rooms": x[:, 2], "price": price[:, 0]}
    parquet.write_table(pa.table(columns), folder / f"{number}.parquet", row_group_size=500)
    parts.append((x, price))

model = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 20]> linear (float[N,3] x) => (float[N,1] y)
    <float[3,1] w = {0.0, 0.0, 0.0}, float[1] b = {0.0}> { a = MatMul(x, w)  y = Add(a, b) }
""")

# %%
# ``shuffle_rows`` is how many rows are shuffled together; the files are shuffled, too.

data = og.data.arrow_dataset(folder, y="price", columns=["area", "age", "rooms"], shuffle_rows=2000)
trainer = og.Trainer(
    model,
    "squared_error",
    optimizer="sgd",
    learning_rate=og.schedules.cosine(0.05),
    metrics=["rmse", "r2"],
    callbacks=[og.callbacks.Timing()],
)
trainer.fit(data, epochs=3, batch_size=100)
table = Table(*trainer.history[0])
for entry in trainer.history:
    table.add_row(*(f"{value:.4g}" for value in entry.values()))
Console().print(table)

# %%
# The weights are those of least squares, and the error of a file is that of its residuals.

x, price = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
ones = np.ones((len(x), 1))
solution = np.linalg.lstsq(np.hstack([x, ones]), price, rcond=None)[0]
learned = np.vstack([trainer.state.weights["w"], trainer.state.weights["b"][None]])
np.testing.assert_allclose(learned, solution, atol=5e-3)
results = trainer.evaluate(og.data.arrow_dataset(folder / "0.parquet", y="price"))
residuals = parts[0][1] - np.hstack([parts[0][0], ones[:2500]]) @ learned
np.testing.assert_allclose(results["rmse"], np.sqrt(np.mean(residuals**2)), rtol=1e-4)

table = Table("", "area", "age", "rooms", "intercept")
for name, numbers in (("least squares", solution), ("learned", learned)):
    table.add_row(name, *(f"{number:.4f}" for number in numbers[:, 0]))
Console().print(table)
plt.hist(residuals[:, 0], 50)
plt.xlabel("residual of a price")
plt.ylabel("rows")
plt.show()
