"""Indices that a table of the model lacks are refused by row, before onnxruntime sees them."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from onnxgrad.compat import OrtGradientOptimizer
from tests.support.combinations import parametrize_chosen
from tests.support.errors import naming
from tests.support.small_models import float32_model, inner_loss_trainer, outer_loss_trainer

R = np.random.default_rng(0)
X = np.float32(R.standard_normal((20, 3)))
Y = X @ np.float32([[2], [-1], [1]])


TABLE = {"t": R.standard_normal((5, 1))}
ONE = np.array([1])
# inputs, nodes to e (N, k, 1) or y (N, 1), other weights, shape of ids; ids are in -5..4
INDICES = {
    "Gather": ("int64[N] i", "y = Gather(t, i)", {}),
    "int32": ("int32[N] i", "y = Gather(t, i)", {}),
    "floats": ("float[N] i", "j = Cast<to=7>(i) y = Gather(t, j)", {}),
    "moved": (
        "int64[N] i",
        """a = Unsqueeze(i, one) b = Identity(a) c = Cast<to=6>(b) d = Squeeze(c, one)
        y = Gather(t, d)""",
        {"one": ONE},
    ),
    "reshaped": (
        "int64[N] i",
        "a = Reshape(i, flat) e = Gather(t, a) y = Squeeze(e, one)",
        {"flat": np.array([-1, 1]), "one": ONE},
    ),
    "axis": ("int64[N] i", "u = Transpose(t) e = Gather<axis=-1>(u, i) y = Transpose(e)", {}),
    "GatherElements": (
        "int64[N,1] i",
        "y = GatherElements(t, i)",
        {},
    ),
    "GatherND": ("int64[N,1] i", "y = GatherND(t, i)", {}),
    "OneHot": (
        "int64[N] i",
        "h = OneHot(i, depth, values) y = MatMul(h, t)",
        {"depth": np.array(5), "values": np.float32([0, 1])},
    ),
    "If": (
        "int64[N] i",
        """y = If (yes) <then_branch = b1 () => (float[N,1] p) { p = Gather(t, i) },
        else_branch = b2 () => (float[N,1] q) { q = Gather(t, i) }>""",
        {"yes": np.array(True)},
    ),
    "Loop": (
        "int64[N] i",
        """z = Gather(zero, o) s = Expand(z, shape) f = Shape(i) g = Concat<axis=0>(f, one)
        r = Expand(s, g) y = Loop (three, yes, r) <body = b (int64 n, bool c, float[N,1] a)
        => (bool d, float[N,1] v) { d = Identity(c) p = Gather(t, i) v = Add(a, p) }>""",
        {
            "zero": np.zeros((1, 1)),
            "o": np.array(0),
            "shape": np.array([1, 1]),
            "one": ONE,
            "three": np.array(3),
            "yes": np.array(True),
        },
    ),
    "Scan": (
        "int64[N] i",
        """y = Scan <num_scan_inputs = 1, body = b (int64 k) => (float[1] p) { p = Gather(t, k) }>
        (i)""",
        {},
    ),
    "Embed": (
        "int64[N,1] i",
        """j = Cast<to=6>(i) e, m = com.microsoft.EmbedLayerNormalization(j, , t, p, , g, b)
        y = Squeeze(e, one)""",
        {"p": np.zeros((1, 1)), "g": np.ones(1), "b": np.zeros(1), "one": ONE},
    ),
}


@parametrize_chosen(
    "trainer name",
    [*((outer_loss_trainer, name) for name in INDICES), (inner_loss_trainer, "Gather")],
    *((inner_loss_trainer, outer_loss_trainer), INDICES),
)
def test_indices_that_a_table_lacks_are_refused(trainer, name):
    declared, nodes, more = INDICES[name]
    model = float32_model(f"g ({declared}) => (float[N,1] y) {{ {nodes} }}", **TABLE, **more)
    low = 0 if name == "Embed" else -5
    ids = np.arange(20) % (5 - low) + low
    assert {low, 4} <= set(ids.tolist())
    made = trainer(model).fit(ids, Y)

    def refuse(row, call, *arguments, **options):
        parts = ["'i'", "of length 5", "1 of 20 rows", f": {row}"]
        with pytest.raises(ValueError, match=naming(*parts)):
            call(*arguments, **options)

    for row, wrong in ((7, 5), (19, -6), (0, 10**6)):
        bad = np.where(np.arange(20) == row, wrong, ids)
        if trainer is outer_loss_trainer:
            refuse(row, made.predict, bad)
            refuse(row, made.losses, bad, Y)
        else:
            refuse(row, trainer(model).fit, bad, Y)
    if name == "Gather":
        refuse(0, trainer(model).fit, bad, Y)
        refuse(0, trainer(model).fit, ids, Y, X_val=bad, y_val=Y)
        refuse(0, trainer(model).fit, [(ids, Y), (bad, Y)])
        refuse(0, trainer(model).fit, {"i": bad}, Y)


def test_indices_in_a_local_function():
    model = float32_model("g (int64[N] i) => (float[N,1] y) { y = local.look(t, i) }", **TABLE)
    model.functions.append(
        onnx.parser.parse_function(
            '<domain: "local", opset_import: ["": 18]> look (t, i) => (y) { y = Gather(t, i) }'
        )
    )
    with pytest.raises(ValueError, match=naming("'i'", "'t'", "2 of 20 rows: 0, 1")):
        outer_loss_trainer(model).fit(np.r_[[5, 5], np.zeros(18)], Y)


def test_every_column_has_its_table():
    """One input for several tables: of each only its column counts."""
    nodes = """a = Slice(i, zero, one, one) b = Gather<axis=1>(i, at) c, d = Split<axis=1>(r, parts)
        u = Gather(t5, a) v = Gather(t9, b) w = Gather(t3, d) u2 = Squeeze(u, one)
        w2 = Squeeze(w, one) s = Add(u2, v) y = Add(s, w2)"""
    nodes = nodes.replace("c, d", "r = Identity(i) c, d")
    model = float32_model(
        f"g (int64[N,3] i) => (float[N,1] y) {{ {nodes} }}",
        t5=np.zeros((5, 1)), t9=np.zeros((9, 1)), t3=np.zeros((3, 1)),
        zero=np.array([0]), one=ONE, at=np.array(1), parts=np.array([2, 1]),
    )  # fmt: skip
    good = np.stack([np.arange(20) % 5, np.arange(20) % 9, np.arange(20) % 3], 1)
    outer_loss_trainer(model).fit(good, Y)
    for column, (name, length) in enumerate([("t5", 5), ("t9", 9), ("t3", 3)]):
        bad = good.copy()
        bad[4, column] = length
        with pytest.raises(ValueError, match=f"into '{name}', of length {length}.*rows: 4"):
            outer_loss_trainer(model).fit(bad, Y)
        bad[4, column] = -length
        outer_loss_trainer(model).fit(bad, Y)


def test_a_part_of_unknown_length_is_indexed():
    """The last token is predicted and never looked up: ids[:, :-1], its length by Shape."""
    nodes = """s = Shape<start=1>(i) e = Sub(s, one) a = Slice(i, zero, e, one) g = Gather(t, a)
        y = ReduceMean<keepdims=0>(g, one)"""
    model = float32_model(
        f"g (int64[N,T] i) => (float[N,1] y) {{ {nodes} }}", **TABLE, zero=np.array([0]), one=ONE
    )
    ids = np.full((20, 3), 4)
    ids[:, -1] = 99
    outer_loss_trainer(model).fit(ids, Y)
    ids[2, 1] = 5
    with pytest.raises(ValueError, match="1 of 20 rows: 2"):
        outer_loss_trainer(model).fit(ids, Y)


def test_tuples_of_indices():
    model = float32_model(
        "g (int64[N,2] i) => (float[N,1] y) { v = GatherND(t, i) y = Unsqueeze(v, one) }",
        t=np.zeros((2, 7)), one=ONE,
    )  # fmt: skip
    good = np.stack([np.arange(20) % 2, np.arange(20) % 7], 1)
    outer_loss_trainer(model).fit(good, Y)
    for row, index in ((3, (2, 0)), (4, (0, 7)), (5, (-3, 0))):
        bad = good.copy()
        bad[row] = index
        with pytest.raises(ValueError, match=f"1 of 20 rows: {row}"):
            outer_loss_trainer(model).fit(bad, Y)


def test_computed_indices_are_left_to_the_runtime():
    for nodes in ("a = Clip(i, zero, four)", "a = Mod(i, five)", "a = Add(i, five)"):
        model = float32_model(
            f"g (int64[N] i) => (float[N,1] y) {{ {nodes} y = Gather(t, a) }}",
            **TABLE, zero=np.array(0), four=np.array(4), five=np.array(5),
        )  # fmt: skip
        outer_loss_trainer(model).fit(np.arange(20) % 5 - (5 if "Add" in nodes else 0), Y)


def test_labels_of_a_loss_in_the_model():
    text = """g (float[N,3] x, int64[N] label) => (float loss)
        { z = MatMul(x, w) loss = SoftmaxCrossEntropyLoss<ignore_index=-1>(z, label) }"""
    model = float32_model(text, w=np.eye(3))
    made = OrtGradientOptimizer(model, max_iter=1)
    made.fit(X, np.arange(20) % 4 - 1)
    for wrong in (3, -2):
        with pytest.raises(ValueError, match=naming("'label'", "0 to 2", "rows: 0")):
            made.fit(X, np.r_[wrong, np.zeros(19)])


def test_a_fixed_batch_of_selected_indices():
    nodes = "a = Gather<axis=1>(i, at) b = Reshape(a, four) e = Gather(t, b) y = Reshape(e, back)"
    model = float32_model(
        f"g (int64[4,2] i) => (float[4,1] y) {{ {nodes} }}",
        **TABLE, at=np.array(0), four=np.array([2, 2]), back=np.array([4, 1]),
    )  # fmt: skip
    good = np.stack([np.arange(20) % 5, np.full(20, 50)], 1)
    outer_loss_trainer(model, batch_size=4).fit(good, Y)
    good[17, 0] = 5
    with pytest.raises(ValueError, match="1 of 20 rows: 17"):
        outer_loss_trainer(model, batch_size=4).fit(good, Y)


def test_the_refused_are_those_that_onnxruntime_refuses():
    model = float32_model("g (int64[N] i) => (float[N,1] y) { y = Gather(t, i) }", **TABLE)
    session = ort.InferenceSession(model.SerializeToString())
    made = outer_loss_trainer(model, batch_size=2).fit(np.array([0, 0]), Y[:2])

    def runs(call, *arguments):
        try:
            call(*arguments)
        except Exception:
            return False
        return True

    for i in range(-8, 8):
        ids = np.array([i, 0])
        assert runs(made.predict, ids) == runs(session.run, None, {"i": ids})


def test_a_part_whose_end_is_another_input_is_indexed():
    nodes = """e = Sub(n, one) a = Slice(i, zero, e, one) g = Gather(t, a)
        y = ReduceMean<keepdims=0>(g, one)"""
    model = float32_model(
        f"g (int64[N,T] i, int64[1] n) => (float[N,1] y) {{ {nodes} }}",
        **{**TABLE, "zero": np.array([0]), "one": ONE},
    )
    ids = np.full((20, 3), 4)
    ids[:, -1] = 99  # never looked up
    batch = {"i": ids, "n": np.array([3]), "label": Y}
    outer_loss_trainer(model).fit([batch])
    with pytest.raises(ValueError, match=naming("'i'", "'t'", "1 of 20 rows: 2")):
        outer_loss_trainer(model).fit(
            [batch | {"i": np.where(np.arange(20)[:, None] == 2, 5, ids)}]
        )
