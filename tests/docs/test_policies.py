"""The page on policies: its poles move as gymnasium's, its losses have PyTorch's gradients."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import onnxgrad as og
from tests.support.pages import blocks_of

STATISTICS = {"obs_mean": np.float32([0, 0, 0, 0]), "obs_std": np.float32([1, 1, 0.1, 1])}


@pytest.fixture
def page(tmp_path, monkeypatch):
    """Return the names that the cells of the page define up to a text, which is in the last one."""
    monkeypatch.chdir(tmp_path)

    def run_cells(*texts):
        names = {"np": np, "onnx": onnx, "og": og}
        cells = [b.code for b in blocks_of("policies.md") if any(t in b.code for t in texts)]
        assert len(cells) == len(texts)
        for code in cells:
            exec(code, names)
        return names

    return run_cells


def test_poles_move_as_in_gymnasium(page):
    gymnasium = pytest.importorskip("gymnasium")
    poles, rng = page("class CartPole")["CartPole"](30, seed=0), np.random.default_rng(1)
    environment, ends = gymnasium.make("CartPole-v1").unwrapped, 0
    for _ in range(100):
        before, action = poles.state.copy(), rng.integers(0, 2, 30)
        ended = poles.step(action)
        for k, state in enumerate(before):
            environment.reset()
            environment.state = state
            _, _, fallen, _, _ = environment.step(int(action[k]))
            assert ended[k] == fallen
            if not fallen:
                np.testing.assert_allclose(poles.state[k], environment.state, rtol=1e-9)
        ends += ended.sum()
    assert ends > 30


def gradients_of_step(model, loss, train, obs, labels):
    """Return the gradients of a step by name: what gradient descent of rate 1 subtracts."""
    trainer = og.Trainer(
        model, og.losses.LossModel(loss), train=train, optimizer="sgd", learning_rate=1.0
    )
    before = {name: trainer.state.weights[name].copy() for name in trainer.trained}
    trainer.fit(obs, labels, batch_size=len(obs))
    return before, {name: w - trainer.state.weights[name] for name, w in before.items()}


def labels_of_torch(torch, log_p, action, rng):
    """Return labels of PPO around log-probabilities of the actions, so that some ratios are cut."""
    old = log_p.detach().numpy() + rng.normal(0, 0.3, len(action)).astype(np.float32)
    advantage = rng.normal(size=len(action)).astype(np.float32)
    ratio, gain = (log_p - torch.tensor(old)).exp(), torch.tensor(advantage)
    assert 0 < (abs(ratio.detach() - 1) > 0.2).sum() < len(action)
    loss = -torch.min(ratio * gain, ratio.clip(0.8, 1.2) * gain)
    return {"action": action, "old": old, "advantage": advantage}, loss


def test_gradients_of_the_discrete_policy(page):
    torch = pytest.importorskip("torch")
    names, rng = page("def new_policy", "ppo = onnx"), np.random.default_rng(2)
    model, obs = names["new_policy"](3), rng.normal(size=(64, 4)).astype(np.float32)
    arrays = {w.name: onnx.numpy_helper.to_array(w).copy() for w in model.graph.initializer}
    arrays["w3"] *= 50
    model = og.graph.replace_initializers_into_onnx(model, {"w3": arrays["w3"]})
    assert all(np.array_equal(arrays[name], value) for name, value in STATISTICS.items())
    w = {n: torch.tensor(a, requires_grad=n not in STATISTICS) for n, a in arrays.items()}
    z = (torch.tensor(obs) - w["obs_mean"]) / w["obs_std"]
    logits = torch.tanh(torch.tanh(z @ w["w1"] + w["b1"]) @ w["w2"] + w["b2"]) @ w["w3"] + w["b3"]
    value = (torch.tanh(z @ w["v1"] + w["d1"]) @ w["v2"] + w["d2"])[:, 0]
    drawn = torch.distributions.Categorical(logits=logits)
    action = rng.integers(0, 2, 64)
    labels, loss = labels_of_torch(torch, drawn.log_prob(torch.tensor(action)), action, rng)
    labels["target"] = rng.normal(size=64).astype(np.float32)
    square = (value - torch.tensor(labels["target"])) ** 2
    (loss + 0.5 * square - 0.01 * drawn.entropy()).mean().backward()
    before, found = gradients_of_step(model, names["ppo"], None, obs, labels)
    assert before.keys() == {n for n, v in w.items() if v.requires_grad}
    for name, gradient in found.items():
        np.testing.assert_allclose(gradient, w[name].grad, rtol=1e-5, atol=1e-6, err_msg=name)


def test_gradients_of_the_gaussian_policy(page):
    torch = pytest.importorskip("torch")
    names, rng = page("arm = onnx", "gaussian = onnx"), np.random.default_rng(4)
    obs, train = rng.normal(size=(64, 3)).astype(np.float32), ["w", "log_std"]
    assert names["continuous"].trained == train
    arrays = {w.name: onnx.numpy_helper.to_array(w) for w in names["arm"].graph.initializer}
    w = {name: torch.tensor(array.copy(), requires_grad=True) for name, array in arrays.items()}
    drawn = torch.distributions.Normal(torch.tensor(obs) @ w["w"], w["log_std"].exp())
    action = rng.normal(size=(64, 2)).astype(np.float32)
    labels, loss = labels_of_torch(torch, drawn.log_prob(torch.tensor(action)).sum(1), action, rng)
    loss.mean().backward()
    _, found = gradients_of_step(names["arm"], names["gaussian"], train, obs, labels)
    for name, gradient in found.items():
        np.testing.assert_allclose(gradient, w[name].grad, rtol=1e-5, atol=1e-6, err_msg=name)
