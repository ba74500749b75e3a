"""A folder of Parquet files, read while the model trains: no more than a few row groups in memory.

The result is that of least squares, which numpy computes from all rows at once.
"""

from pathlib import Path

import numpy as np
import onnx
import pyarrow as pa
from pyarrow import parquet

import onnxgrad as og

rng = np.random.default_rng(0)
true = np.array([[2.0], [-1.0], [0.5]])
folder = Path("rows")
folder.mkdir(exist_ok=True)
parts = []
for number in range(8):  # eight files of 2500 rows, in row groups of 500
    x = rng.normal(size=(2500, 3))
    price = x @ true + 3 + rng.normal(scale=0.1, size=(2500, 1))
    columns = {"area": x[:, 0], "age": x[:, 1], "rooms": x[:, 2], "price": price[:, 0]}
    parquet.write_table(pa.table(columns), folder / f"{number}.parquet", row_group_size=500)
    parts.append((x, price))

model = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 20]> linear (float[N,3] x) => (float[N,1] y)
    <float[3,1] w = {0.0, 0.0, 0.0}, float[1] b = {0.0}> { a = MatMul(x, w)  y = Add(a, b) }
""")

data = og.arrow_dataset(folder, y="price", columns=["area", "age", "rooms"], shuffle_rows=2000)
trainer = og.Trainer(
    model,
    "squared_error",
    optimizer="sgd",
    learning_rate=og.cosine(0.05),
    metrics=["rmse", "r2"],
    callbacks=[og.Timing()],
)
trainer.fit(data, epochs=3, batch_size=100)
for entry in trainer.history:
    print({name: round(value, 4) for name, value in entry.items()})
results = trainer.evaluate(og.arrow_dataset(folder / "0.parquet", y="price"))
print(results)

x, price = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
ones = np.ones((len(x), 1))
solution = np.linalg.lstsq(np.hstack([x, ones]), price, rcond=None)[0]
learned = np.vstack([trainer.state.weights["w"], trainer.state.weights["b"][None]])
print("least squares", solution[:, 0], "learned", learned[:, 0])
np.testing.assert_allclose(learned, solution, atol=5e-3)
residuals = parts[0][1] - np.hstack([parts[0][0], ones[:2500]]) @ learned
np.testing.assert_allclose(results["rmse"], np.sqrt(np.mean(residuals**2)), rtol=1e-4)
