"""`summary`, compared with torchinfo and with PyTorch's own counter of operations."""

from __future__ import annotations

import numpy as np
import pytest

import onnxgrad as og
from tests.support.exports import export_module
from tests.support.models import parse_model
from tests.support.running import in_sweep


def networks_and_rows():
    torch = pytest.importorskip("torch")
    nn = torch.nn

    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(5, 7, num_layers=2, bidirectional=True, batch_first=True)
            self.head = nn.Linear(14, 3)

        def forward(self, x):
            return self.head(self.lstm(x)[0][:, -1])

    cnn = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, stride=2, groups=4, bias=False), nn.ReLU(), nn.Flatten(),
        nn.Linear(16 * 7 * 7, 10),
    )  # fmt: skip
    mlp = nn.Sequential(nn.Linear(20, 50), nn.Tanh(), nn.Linear(50, 30, bias=False), nn.GELU(),
                        nn.Linear(30, 4))  # fmt: skip
    return {
        "cnn": (cnn, torch.randn(2, 3, 32, 32)),
        "mlp": (mlp, torch.randn(8, 20)),
        "lstm": (Last(), torch.randn(2, 11, 5)),
    }


@pytest.mark.parametrize(
    ("name", "dynamo"),
    [
        *[("cnn", False), ("mlp", False), ("lstm", False)],
        *[in_sweep("mlp", True), in_sweep("cnn", True), in_sweep("lstm", True)],
    ],
)
def test_torchinfo(name, dynamo):
    torchinfo = pytest.importorskip("torchinfo")
    network, x = networks_and_rows()[name]
    expected = torchinfo.summary(network, input_data=x, verbose=0)
    table = og.summary(export_module(network, [x], dynamo=dynamo))
    assert table.total("parameters") == expected.total_params
    assert table.total("trainable") == expected.trainable_params
    assert table.total("multiply_adds") == expected.total_mult_adds
    assert not table.uncounted
    if name != "lstm":  # of which torchinfo takes the first of three results
        outputs = sum(layer.output_bytes for layer in table if layer.parameters)
        assert 2 * outputs == expected.total_output_bytes  # values, and their gradients


@pytest.mark.parametrize("dynamo", [False, in_sweep(True)])
def test_transformer(dynamo):
    """torchinfo counts one row for all positions of a sequence: PyTorch counts as we do."""
    torch = pytest.importorskip("torch")
    torchinfo = pytest.importorskip("torchinfo")
    from torch.utils.flop_counter import FlopCounterMode

    class SelfAttention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = (torch.nn.Linear(16, 16, bias=False) for _ in range(3))
            self.norm, self.out = torch.nn.LayerNorm(16), torch.nn.Linear(16, 16, bias=False)

        def forward(self, x):
            q, k, v = (f(x).view(3, 9, 4, 4).transpose(1, 2) for f in (self.q, self.k, self.v))
            scores = torch.softmax(q @ k.transpose(2, 3) / 2, -1) @ v
            return self.norm(x + self.out(scores.transpose(1, 2).flatten(2)))

    network, x = torch.nn.Sequential(SelfAttention(), SelfAttention()), torch.randn(3, 9, 16)
    for parameter in network.parameters():  # exporters store equal tensors once
        torch.nn.init.normal_(parameter)
    with FlopCounterMode(display=False) as counter:
        network(x)
    model = export_module(network, [x], dynamo=dynamo)
    table = og.summary(model)
    assert table.total("parameters") == torchinfo.summary(network, verbose=0).total_params
    # the bias of a LayerNorm is of the operator, or added by a node of its own
    assert table.total("multiply_adds") - counter.get_total_flops() // 2 in (0, 2 * x.numel())
    assert {"0.q", "1.norm"} <= {layer.name for layer in table}
    assert [layer.name for layer in og.summary(model, depth=1)] == ["0", "1"]


def test_lengths_that_the_file_computes():
    """Exporters write x.view(x.shape[0], ...) as Shape, Gather and Concat in front of a Reshape."""
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode

    class Heads(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = torch.nn.Linear(16, 48, bias=False)

        def forward(self, x):
            n, t, c = x.shape
            q, k, v = self.qkv(x).view(n, t, 3, 4, c // 4).permute(2, 0, 3, 1, 4)
            return (torch.softmax(q @ k.transpose(2, 3), -1) @ v).transpose(1, 2).reshape(n, t, c)

    network, x = Heads(), torch.randn(3, 9, 16)
    with FlopCounterMode(display=False) as counter:
        network(x)
    axes = {"x": {0: "N", 1: "T"}}
    model = export_module(network, [x], dynamo=False, input_names=["x"], dynamic_axes=axes)
    table = og.summary(model, lengths={"N": 3, "T": 9})
    assert not table.uncounted
    assert table.total("multiply_adds") == counter.get_total_flops() // 2


def test_weights_that_the_file_puts_in_another_order():
    torch = pytest.importorskip("torch")
    network, x = torch.nn.LSTM(5, 7), torch.randn(11, 2, 5)
    table = og.summary(export_module(network, [x], dynamo=False, do_constant_folding=False))
    assert table.total("parameters") == sum(p.numel() for p in network.parameters())
    assert not table.uncounted


def test_batch_norm_has_no_statistics_among_parameters():
    torch = pytest.importorskip("torch")
    torchinfo = pytest.importorskip("torchinfo")
    network = torch.nn.Sequential(torch.nn.BatchNorm2d(4), torch.nn.Conv2d(4, 2, 3))
    network[0].running_mean.add_(1.5)
    table = og.summary(export_module(network, [torch.randn(1, 4, 8, 8)], dynamo=False))
    assert table.total("parameters") == torchinfo.summary(network, verbose=0).total_params


TWO = """<ir_version: 9, opset_import: ["": 20]>
    f (float[N,T,4] x, float[?,4] z) => (float[N,T,3] y, float[M,4] u)
    <float[4,3] w = {1,2,3,4,5,6,7,8,9,1,2,3}, float[3] b = {1,2,3}>
    { h = MatMul(x, w) y = Add(h, b)  u = Exp(z) }"""


def test_lengths_and_by_node():
    table = og.summary(parse_model(TWO), lengths={"N": 5, "T": 2})
    assert [layer.name for layer in table] == ["MatMul", "Add", "Exp"]
    assert table[0].shapes == ((5, 2, 3),)
    assert [layer.multiply_adds for layer in table] == [5 * 2 * 3 * 4, 5 * 2 * 3, 0]
    assert [layer.activation_bytes for layer in table] == [120, 120, 16]
    assert table.lengths == {"N": 5, "T": 2, "z.shape[0]": 1}
    assert "for N=5, T=2, z.shape[0]=1" in str(table)
    assert og.summary(parse_model(TWO))[0].shapes == ((1, 1, 3),)
    assert og.summary(parse_model(TWO), train="w").total("trainable") == 12
    html = table._repr_html_()
    assert html.count("<tr>") == 5
    assert '<td style="text-align:right">120</td>' in html


def test_what_is_not_counted_is_said():
    model = parse_model("""<ir_version: 9, opset_import: ["": 20, "own": 1]>
        f (float[4,4] x, int64 n, bool c) => (float[4,4] y, float[4,4] v)
        <float[4,4] w = {1,2,3,4,5,6,7,8,9,1,2,3,4,5,6,7}>
        { v = own.Odd(x)  y = Loop(n, c, x) <body = b (int64 i, bool g, float[4,4] s)
          => (bool g2, float[4,4] t) { g2 = Identity(g)  t = MatMul(s, w) }> }""")
    model.graph.node[0].name = "<odd>"
    table = og.summary(model)
    assert table.total("multiply_adds") == 64
    assert any("Odd" in text for text in table.uncounted)
    assert any("Loop" in text and "once" in text for text in table.uncounted)
    assert "&lt;odd&gt;" in table._repr_html_()


def test_a_scan_counts_each_step_and_an_if_its_larger_branch():
    model = parse_model("""<ir_version: 9, opset_import: ["": 20]>
        f (float[7,3] x, float[3] s0, bool c) => (float[3] s, float[3,3] y)
        <float[3,3] w = {1,2,3,4,5,6,7,8,9}>
        { s = Scan<num_scan_inputs = 1, body = b (float[3] s1, float[3] e) => (float[3] s2)
            { m = MatMul(s1, w)  s2 = Add(m, e) }> (s0, x)
          y = If(c) <then_branch = t () => (float[3,3] p) { p = MatMul(w, w) },
                     else_branch = e () => (float[3,3] q) { q = Identity(w) }> }""")
    table = og.summary(model)
    assert [layer.multiply_adds for layer in table] == [7 * 9, 27]
    assert table[0].parameters == 9


def test_wrong_arguments():
    with pytest.raises(ValueError, match="'K'"):
        og.summary(parse_model(TWO), lengths={"K": 1})
    with pytest.raises(ValueError, match=r"'N'.* 1, not 0"):
        og.summary(parse_model(TWO), lengths={"N": 0})
    with pytest.raises(ValueError, match=r"depth.* 1, not 0"):
        og.summary(parse_model(TWO), depth=0)
    with pytest.raises(ValueError, match="field 'parameter'"):
        og.summary(parse_model(TWO)).total("parameter")


@pytest.mark.parametrize(
    ("node", "shapes", "expected"),
    [
        ("Einsum<equation='bij,bjk->bik'>(a, b)", "float[2,3,4] a, float[2,4,5] b", 120),
        ("ConvTranspose(a, b)", "float[1,2,5] a, float[2,3,4] b", 5 * 2 * 3 * 4),
        ("Gemm<transA=1>(a, b)", "float[4,3] a, float[4,5] b", 60),
        ("Attention(a, b, b)", "float[1,2,3,4] a, float[1,2,5,4] b", 2 * 3 * 5 * 8),
        ("Attention<q_num_heads=2, kv_num_heads=2>(a, b, b)", "float[1,3,8] a, float[1,5,8] b",
         2 * 3 * 5 * 8),
        ("MatMul(a, b)", "float[2,3,4] a, float[4,5] b", 120),
    ],
)  # fmt: skip
def test_operators(node, shapes, expected):
    node = node.replace("'", '"')
    model = parse_model(
        f"f ({shapes}) => (float y) {{ y = {node} }}", opset=23, output_shapes=False
    )
    assert og.summary(model).total("multiply_adds") == expected


@pytest.mark.parametrize(
    ("rule", "rates", "products"), [("linear", "", 4 + 2), ("delta", ", , , b", 4 + 2 + 2)]
)
def test_linear_attention(rule, rates, products):
    """For each of 2 x 3 tokens, 4 queries and 2 keys of size 5 meet states of 5 x 6; for the delta
    rule, the keys meet them twice.
    """
    model = parse_model(
        f"""f (float[2,3,20] q, float[2,3,10] k, float[2,3,12] v, float[2,3,2] b)
        => (float[2,3,24] y, float[2,2,5,6] z) {{
            y, z = LinearAttention<q_num_heads=4, kv_num_heads=2, update_rule="{rule}">
                (q, k, v{rates})
        }}""",
        opset=27,
    )
    assert og.summary(model).total("multiply_adds") == 2 * 3 * products * 5 * 6


def test_numbers_are_those_of_numpy():
    table = og.summary(parse_model(TWO), lengths={"N": 2, "T": 3})
    x, w = np.ones((2, 3, 4)), np.ones((4, 3))
    assert table[0].multiply_adds == (x @ w).sum()
