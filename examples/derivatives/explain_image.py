"""Which pixels a CNN looks at, and which change misleads it
=========================================================

Each image has a bright square, and its class says whether the square is on the left or on the
right. Grad-CAM, integrated gradients and occlusion find the square. The fast gradient sign method
(`Goodfellow et al. 2015 <https://arxiv.org/abs/1412.6572>`_) moves every pixel by a small amount in
the direction that raises the loss. A change by this method misleads the CNN, and a random change of
the same size does not.
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
tops, lefts = rng.integers(0, 12, 400), rng.integers(0, 4, 400) + 8 * side
images = rng.normal(0, 0.2, (400, 1, 16, 16)).astype(np.float32)
square = np.zeros(images.shape, bool)
for mask, top, left in zip(square, tops, lefts):
    mask[0, top : top + 4, left : left + 4] = True
images[square] += 1.5
trainer = og.Trainer(model, "cross_entropy", learning_rate=0.01)
trainer.fit(images[:300], side[:300], epochs=15)

# %%
# Grad-CAM, integrated gradients and occlusion explain the score of the right class, for 100 images
# that the CNN was not trained on. A ``ScoreFunction`` creates the sessions once for several
# methods. The integrated gradients of an image add up to the difference between its score and the
# score of a black image, but for the gap that their 50 steps leave.

x, target = images[300:], side[300:]
scores = og.explain.ScoreFunction(trainer.model, wrt="x")
assert (scores.at(x).output.argmax(axis=1) == target).mean() > 0.95
heat_maps = {
    "Grad-CAM": og.explain.grad_cam(trainer.model, x, "h", target, relu=True),
    "integrated gradients": og.explain.integrated_gradients(scores, x, target),
    "occlusion": og.explain.occlusion(scores, x, (1, 4, 4), target, strides=(1, 2, 2)),
}
gap = og.explain.completeness_gap(scores, heat_maps["integrated gradients"], x, target)
print(f"integrated gradients: the largest gap is {np.abs(gap).max():.1e}")
assert np.abs(gap).max() < 0.1

# %%
# Grad-CAM, integrated gradients and occlusion attribute more of the score to a pixel inside of the
# square than to a pixel outside of it.

figure, axes = plt.subplots(1, 3, figsize=(9, 3), layout="constrained")
for axis, (name, heat) in zip(axes, heat_maps.items()):
    inside, outside = np.abs(heat[square[300:]]).mean(), np.abs(heat[~square[300:]]).mean()
    print(f"{name}: {inside / outside:.1f} times as much inside of the square")
    assert inside > 2 * outside
    og.explain.show_image(heat[0], x[0], axis).set_title(name)
plt.show()

# %%
# ``fgsm`` changes the images along the sign of the gradient of the loss. For comparison, the same
# images are also changed along random signs.


def accuracy(changed):
    """Return the share of images whose class the CNN says correctly."""
    return np.mean(trainer.predict(changed.astype(np.float32)).argmax(axis=1) == target)


sizes, signs = np.linspace(0, 1, 11), np.sign(rng.normal(size=x.shape))
attacked = [accuracy(og.explain.fgsm(scores, x, size, target)) for size in sizes]
random = [accuracy(x + size * signs) for size in sizes]
print("accuracy after the attack", np.round(attacked, 2), "random signs", np.round(random, 2))
assert attacked[4] < 0.5 < 0.9 < random[4]
plt.plot(sizes, attacked, label="signs of the gradient")
plt.plot(sizes, random, label="random signs")
plt.gca().set(xlabel="change of each pixel; the square is 1.5 brighter", ylabel="accuracy")
plt.legend()
plt.show()
