"""Which pixels a CNN looks at
===========================

Each image has a bright square, and the class says whether it is on the left or on the right.
"""

import matplotlib.pyplot as plt
import numpy as np
import onnx
from onnx import numpy_helper

import onnxgrad as og

rng = np.random.default_rng(0)
model = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 20]>
    cnn (float[N,1,16,16] x) => (float[N,2] y) <int64[2] shape = {0, -1}>
    { c = Conv<pads=[1,1,1,1]>(x, k)  h = Relu(c)  p = MaxPool<kernel_shape=[4,4], strides=[4,4]>(h)
      f = Reshape(p, shape)  y = MatMul(f, w) }""")
weights = {"k": rng.normal(0, 0.3, (4, 1, 3, 3)), "w": rng.normal(0, 0.1, (64, 2))}
for name, value in weights.items():
    model.graph.initializer.append(numpy_helper.from_array(value.astype(np.float32), name))

side = rng.integers(0, 2, 400)
rows, columns = rng.integers(0, 12, 400), rng.integers(0, 4, 400) + 8 * side
images = rng.normal(0, 0.2, (400, 1, 16, 16)).astype(np.float32)
for image, row, column in zip(images, rows, columns):
    image[0, row : row + 4, column : column + 4] += 1.5
trainer = og.Trainer(model, "cross_entropy", learning_rate=0.01)
trained = trainer.fit(images[:300], side[:300], epochs=15).model

# %%
# A score function is built once: Grad-CAM, integrated gradients and occlusion run it on rows that
# were not trained on. Integrated gradients add up to the difference of two scores; the gap is what
# their 50 steps miss.

x, target = images[300:], side[300:]
scores = og.explain.ScoreFunction(trained, wrt="x")
assert (scores.at(x).output.argmax(axis=1) == target).mean() > 0.95
found = {
    "Grad-CAM": og.explain.grad_cam(trained, x, "h", target, relu=True),
    "integrated gradients": og.explain.integrated_gradients(scores, x, target),
    "occlusion": og.explain.occlusion(scores, x, (1, 4, 4), target, strides=(1, 2, 2)),
}
gap = og.explain.completeness_gap(scores, found["integrated gradients"], x, target)
print(f"integrated gradients: the greatest gap is {np.abs(gap).max():.1e}")
assert np.abs(gap).max() < 0.1
square = np.zeros(x.shape, bool)
for mask, row, column in zip(square, rows[300:], columns[300:]):
    mask[0, row : row + 4, column : column + 4] = True
for name, heat in found.items():
    inside, outside = np.abs(heat[square]).mean(), np.abs(heat[~square]).mean()
    print(f"{name}: {inside / outside:.1f} times as much inside of the square")
    assert inside > 2 * outside

# %%
# All three point at the square.

figure, axes = plt.subplots(1, 3, figsize=(9, 3), layout="constrained")
for axis, (name, heat) in zip(axes, found.items()):
    og.explain.show_image(heat[0], x[0], axis).set_title(name)
plt.show()
