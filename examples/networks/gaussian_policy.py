"""A Gaussian policy learns by PPO
===============================

A policy draws the acceleration of a point in a plane, and learns to bring the point to the origin.
The loss of PPO (`Schulman et al. 2017 <https://arxiv.org/abs/1707.06347>`_) is a second ONNX model:
its inputs with the names of outputs of the policy read these outputs, and its other inputs are
labels. The gradients of one step are compared with PyTorch.
"""

import matplotlib.pyplot as plt
import numpy as np
import onnx
import torch
from onnxruntime import InferenceSession

import onnxgrad as og

policy = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 20]>
    policy (float[N,4] obs) => (float[N,2] mean, float[2] std) <float[2] log_std = {-0.5, -0.5}>
    { a = MatMul(obs, w1)  h = Tanh(a)  mean = MatMul(h, w2)  std = Exp(log_std) }
""")
rng = np.random.default_rng(0)
for name, w in (("w1", rng.normal(0, 0.5, (4, 32))), ("w2", rng.normal(0, 0.01, (32, 2)))):
    policy.graph.initializer.append(onnx.numpy_helper.from_array(w.astype(np.float32), name))

# %%
# The loss of a row is -min(r A, clip(r, 0.8, 1.2) A), with the advantage A, and the ratio r of the
# probability density of the action to its density when it was drawn; both lack the factor of 2 pi.
# ``train`` names ``log_std``, too, which is no factor of a product, and does not train by default.

ppo = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 20]> ppo (float[N,2] mean, float[2] std,
        float[N,2] action, float[N] old, float[N] advantage) => (float[N] loss)
    <int64[1] axis = {1}, float low = {0.8}, float high = {1.2}, float half = {0.5}> {
        error = Sub(action, mean)  z = Div(error, std)  zz = Mul(z, z)  half_zz = Mul(half, zz)
        log_std = Log(std)  terms = Add(half_zz, log_std)
        minus_new = ReduceSum<keepdims = 0>(terms, axis)  minus_change = Add(minus_new, old)
        change = Neg(minus_change)  ratio = Exp(change)  plain = Mul(ratio, advantage)
        cut = Clip(ratio, low, high)  clipped = Mul(cut, advantage)
        gain = Min(plain, clipped)  loss = Neg(gain) }
""")
loss, trained = og.losses.LossModel(ppo), ["w1", "w2", "log_std"]


def rollout(model):
    """Return observations, labels and the mean return of 128 points that move for 20 steps."""
    session, rows = InferenceSession(model.SerializeToString()), []
    place, speed = rng.uniform(-1, 1, (128, 2)), np.zeros((128, 2))
    for _ in range(20):
        obs = np.hstack([place, speed]).astype(np.float32)
        mean, std = session.run(None, {"obs": obs})
        noise = rng.standard_normal(mean.shape)
        old = -(0.5 * noise**2 + np.log(std)).sum(axis=1)
        speed = speed + 0.2 * np.clip(mean + std * noise, -2, 2)
        place = place + 0.2 * speed
        rows.append((obs, mean + std * noise, old, -(place**2).sum(axis=1)))
    obs, action, old, reward = (np.stack(column) for column in zip(*rows, strict=True))
    to_go = reward[::-1].cumsum(axis=0)[::-1]  # the rewards from each step on
    gain = (to_go - to_go.mean(axis=1, keepdims=True)).ravel()
    labels = {"action": action.reshape(-1, 2), "old": old.ravel(), "advantage": gain / gain.std()}
    return obs.reshape(-1, 4), labels, to_go[0].mean()


# %%
# In each round, the policy trains for four epochs on one rollout.

trainer = og.Trainer(policy, loss, train=trained, optimizer="adam", learning_rate=3e-3)
returns = []
for _ in range(60):
    obs, labels, value = rollout(trainer.model)
    returns.append(value)
    for _ in range(4):
        trainer.partial_fit(obs, labels, batch_size=512)
print("mean return before and after:", returns[0], returns[-1])
assert returns[-1] > returns[0] / 3
plt.plot(returns)
plt.gca().set(xlabel="round", ylabel="mean return")
plt.show()

# %%
# One more step, by gradient descent with rate 1, subtracts the gradients from the weights. In
# PyTorch, the same loss has the same gradients.

step = og.Trainer(trainer.model, loss, train=trained, optimizer="sgd", learning_rate=1.0)
w = {name: torch.tensor(step.state.weights[name], requires_grad=True) for name in trained}
step.fit(obs, labels, batch_size=len(obs))
action, old, advantage = (torch.tensor(labels[name]) for name in ("action", "old", "advantage"))
mean = torch.tanh(torch.tensor(obs) @ w["w1"]) @ w["w2"]
density = torch.distributions.Normal(mean, w["log_std"].exp()).log_prob(action)
ratio = ((density + np.log(2 * np.pi) / 2).sum(axis=1) - old).exp()
torch.min(ratio * advantage, ratio.clip(0.8, 1.2) * advantage).mean().neg().backward()
for name, before in w.items():
    np.testing.assert_allclose(before.detach() - before.grad, step.state.weights[name], atol=1e-5)
