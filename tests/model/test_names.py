"""Names are data: what a terminal would act on never reaches it, nor a message.

Every name of a model ends in an escape sequence, line ends and a character that turns the direction
of text. Whatever prints or raises is called on it.
"""

from __future__ import annotations

import copy
import logging
import pickle
import unicodedata
import warnings

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import AttributeProto, helper
from typer.testing import CliRunner

import onnxgrad
from onnxgrad import errors
from onnxgrad.cli import app
from onnxgrad.data.arrays import DataError
from onnxgrad.errors import printable, printable_lines
from tests.support.models import add_initializers, parse_model

BAD = "\x1b[31m\r\n\u202e"
SHOWN = r"\x1b[31m\r\n\u202e"
X = np.random.default_rng(0).standard_normal((12, 2)).astype(np.float32)
Y = (X[:, :1] - X[:, 1:]).astype(np.float32)
HEAD = "g (float[N,2] x) => (float[N,1] y) { h = MatMul(x, w)  "
LINEAR = HEAD + "y = Add(h, b) }"
TWO = """g (float[N,2] x, float[N,2] z) => (float[N,1] y, float[N,1] h) {
    s = Add(x, z)  h = MatMul(s, w)  y = Add(h, b) }"""
FOREIGN = HEAD + 'y = acme.Foo<alpha=3, text="a", texts=["a", "b"]>(h, b) }'
LOOP = f"""{HEAD} c = Greater(h, b)
    t = ReduceMax<keepdims=0>(h)  p = Less(t, t)  y = If(p) <
    then_branch = one () => (float[N,1] q) {{ q = Add(h, b) }},
    else_branch = two () => (float[N,1] r) {{ r = Mul(h, b) }}> }}"""
QUANTIZED = HEAD + "q = QuantizeLinear(h, b)  y = DequantizeLinear(q, b) }"
ROUNDED = HEAD + "r = Round(h) y = Add(r, b)}"
SORTED = HEAD + "r = NonZero(h)  f = Cast<to=1>(r)  t = Transpose(f)  y = Slice(t, i, j, k) }"


def model_of_names(text: str) -> onnx.ModelProto:
    """Return the model of a text, with initializers of the names that it reads."""
    made = parse_model(text, domains={"ai.onnx.ml": 3, "acme": 1})
    constants = {"w": [[0.1], [0.2]], "b": [0.3], "i": [0], "j": [1], "k": [1]}
    read = {x for node in made.graph.node for x in node.input}
    add_initializers(made, {n: a for n, a in constants.items() if n in read or "If(" in text})
    return made


def poisoned(text: str) -> onnx.ModelProto:
    """Return the model with BAD at the end of all that is a name, or text."""
    made = model_of_names(text)
    foreign = {d.domain for d in made.opset_import} - {"", "ai.onnx.ml"}
    made.producer_name += BAD
    made.doc_string = BAD
    made.metadata_props.add(key=f"key{BAD}", value=f"value{BAD}")
    for opset in made.opset_import:
        if opset.domain in foreign:
            opset.domain += BAD
    _poison(made.graph, foreign)
    return made


def _poison(graph: onnx.GraphProto, foreign: set[str]) -> None:
    graph.name += BAD
    graph.doc_string = BAD
    for value in (*graph.input, *graph.output, *graph.value_info):
        value.name += BAD
        value.doc_string = BAD
        for d in value.type.tensor_type.shape.dim:
            if d.dim_param:
                d.dim_param += BAD
    for tensor in graph.initializer:
        tensor.name += BAD
        tensor.doc_string = BAD
    for i, node in enumerate(graph.node):
        node.name = f"node{i}{BAD}"
        node.doc_string = BAD
        node.input[:] = [f"{x}{BAD}" for x in node.input]
        node.output[:] = [f"{y}{BAD}" for y in node.output]
        for a in node.attribute:
            if a.type == AttributeProto.GRAPH:
                _poison(a.g, foreign)
        if node.domain in foreign:
            node.domain += BAD
            node.op_type += BAD
            for a in node.attribute:
                a.name += BAD
                a.doc_string = BAD
                a.s += BAD.encode() if a.type == AttributeProto.STRING else b""
                a.strings[:] = [s + BAD.encode() for s in a.strings]


def bad_name(text: str) -> str:
    return text + BAD


def clean(text: str) -> None:
    bad = {c for c in text if not c.isprintable() and c != "\n"}
    assert not bad, (bad, text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("x", "x"), ("", ""), ("größe µ 入力 😀 e\u0301 \\n", "größe µ 入力 😀 e\u0301 \\n"),
        ("a\tb", r"a\tb"), ("a\nb", r"a\nb"), ("\x00", r"\x00"), ("\x7f\x85\x9b", r"\x7f\x85\x9b"),
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("\u202a\u202e\u2066\u2069", r"\u202a\u202e\u2066\u2069"),
        ("\u200b\u200d\ufeff\u00ad", r"\u200b\u200d\ufeff\xad"), ("\u2028\u2029", r"\u2028\u2029"),
        ("\ud800", r"\ud800"), ("\U000e0041", r"\U000e0041"), (BAD, SHOWN),
    ],
)  # fmt: skip
def test_printable(text, shown):
    assert printable(text) == shown
    assert printable(shown) == shown
    assert all(unicodedata.category(c)[0] != "C" for c in printable(text))


def test_lines_of_a_message_stay():
    assert printable_lines(f"a\nb\r\n{BAD}") == "a\nb\\r\n\\x1b[31m\\r\n\\u202e"


@pytest.mark.parametrize(
    "kind",
    [errors.ModelError, errors.NoGradientRule, errors.ConvergenceError, errors.ConvergenceWarning,
     errors.EvaluationError, errors.ProviderError, DataError],
)  # fmt: skip
def test_errors_of_the_package(kind):
    made = kind(f"of {BAD}", 3)
    for e in (made, pickle.loads(pickle.dumps(made)), copy.copy(made)):
        assert type(e) is kind
        assert e.args[1] == 3
        clean(str(e))
        clean(repr(e))
    clean(str(errors.unknown("weight", BAD, [bad_name("w")])))


# -- everything that prints or raises --------------------------------------------------------------


def outer_trainer(text, **options):
    options = {"max_iter": 2, "random_state": 0, "verbose": 1} | options
    return onnxgrad.compat.OrtGradientForwardBackwardOptimizer(poisoned(text), **options)


def fit_inner_trainer(text, **options):
    made = onnxgrad.add_loss_output(poisoned(text))
    made = onnxgrad.compat.OrtGradientOptimizer(made, max_iter=2, verbose=1, **options)
    made.fit(X, Y)
    return repr(made)


def fit_outer_trainer(text, X=X, Y=Y, **options):
    made = outer_trainer(text, **options).fit(X, Y)
    return repr(made), made.score(X, Y), made.get_state()


def run_passes(text, feed=None, **options):
    made = onnxgrad.compat.OrtGradientForwardBackward(
        poisoned(text), enable_logging=True, **options
    )
    passed = made.new_instance()
    shown = repr(made), repr(passed)
    passed.forward([X, np.float32([[1], [2]]), np.float32([3])] if feed is None else feed)
    return shown


def derivative(text, *args, **options):
    made = onnxgrad.onnx_derivative(poisoned(text), *args, verbose=2, **options)
    return onnxgrad.plot.onnx_simple_text_plot(made), onnxgrad.plot.to_dot(made)


def dangling():
    made = poisoned(LINEAR)
    made.graph.node[1].input[0] = bad_name("nowhere")
    return made


def model_with_missing_file():
    made = poisoned(LINEAR)
    tensor = made.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=bad_name("file"))
    return made


def of_maps():
    made = poisoned(LINEAR)
    node = made.graph.node.add(op_type="ZipMap", domain="ai.onnx.ml", name=bad_name("zip"))
    node.input.append(bad_name("y"))
    node.output.append(bad_name("map"))
    node.attribute.append(helper.make_attribute("classlabels_int64s", [0]))
    kind = helper.make_sequence_type_proto(
        helper.make_map_type_proto(7, helper.make_tensor_type_proto(1, []))
    )
    made.graph.output[0].CopyFrom(helper.make_value_info(bad_name("map"), kind))
    return made


def wrong_shapes():
    """A model that onnxruntime refuses when it runs."""
    made = poisoned(LINEAR)
    made.graph.input[0].type.tensor_type.shape.dim[1].dim_param = bad_name("M")
    return made


def poisoned_module(text):
    pytest.importorskip("torch")
    from onnxgrad.torch import OnnxModule

    return OnnxModule(poisoned(text))


def call_module(text, *inputs, **named):
    import_torch = pytest.importorskip("torch")
    made = poisoned_module(text)
    made(*[import_torch.as_tensor(x) for x in inputs], **named)
    return repr(made)


def load_state():
    torch = pytest.importorskip("torch")
    made = poisoned_module(LINEAR)
    made.load_state_dict({key: torch.zeros(7) for key in made.state_dict()})


def on_axes(**options):
    plt = pytest.importorskip("matplotlib.pyplot")
    axes = onnxgrad.plot.plot_onnxs(poisoned(LOOP), renderer="matplotlib", **options)
    texts = [axes.get_title(), *(t.get_text() for t in axes.texts)]
    plt.close("all")
    return texts


O = onnxgrad  # noqa: E741
CALLS = {
    "text": lambda: [O.onnx_simple_text_plot(poisoned(t)) for t in (LINEAR, FOREIGN, LOOP, TWO)],
    "io": lambda: [O.onnx_text_plot_io(poisoned(t)) for t in (LINEAR, FOREIGN, LOOP)],
    "dot": lambda: [O.to_dot(poisoned(t)) for t in (LINEAR, FOREIGN, LOOP)],
    "figure": lambda: on_axes(title=BAD),
    "derivative": lambda: derivative(LINEAR),
    "derivative of If": lambda: derivative(LOOP),
    "no rule": lambda: derivative(FOREIGN),
    "quantized": lambda: derivative(QUANTIZED),
    "rounded": lambda: derivative(ROUNDED),
    "selection": lambda: derivative(SORTED),
    "unknown weight": lambda: derivative(LINEAR, [bad_name("weight")]),
    "a weight twice": lambda: derivative(LINEAR, [bad_name("w")] * 2),
    "a text": lambda: derivative(LINEAR, bad_name("w")),
    "unknown input": lambda: derivative(LINEAR, [], [bad_name("input")]),
    "integer weight": lambda: derivative(SORTED, [bad_name("i")]),
    "no path": lambda: derivative(ROUNDED, [bad_name("w")]),
    "stop_gradient": lambda: derivative(LINEAR, stop_gradient=[bad_name("q")]),
    "straight_through": lambda: derivative(LOOP, straight_through=[bad_name("p")]),
    "unknown label": lambda: derivative(
        LINEAR, options=O.DerivativeOptions.Loss, loss=bad_name("y"), label=bad_name("l")
    ),
    "unknown loss": lambda: derivative(
        LINEAR, options=O.DerivativeOptions.Loss, loss=bad_name("l"), label=bad_name("x")
    ),
    "maps": lambda: O.onnx_derivative(of_maps(), options=O.DerivativeOptions.KeepOutputs),
    "maps alone": lambda: O.add_loss_output(of_maps()),
    "maps selected": lambda: O.select_model_inputs_outputs(of_maps(), [bad_name("map")]),
    "dangling": lambda: O.onnx_derivative(dangling()),
    "dangling renamed": lambda: O.onnx_rename_names(dangling()),
    "dangling session": lambda: O.check_gradient(dangling()),
    "external": lambda: O.onnx_derivative(model_with_missing_file()),
    "no file": lambda: O.onnx_derivative(bad_name("/nowhere/model")),
    "no model": lambda: O.onnx_derivative(BAD.encode()),
    "save nowhere": lambda: O.save(poisoned(LINEAR), bad_name("/nowhere/model")),
    "rename": lambda: O.onnx_rename_names(poisoned(LOOP), verbose=2),
    "rename weights": lambda: O.onnx_simple_text_plot(O.onnx_rename_weights(poisoned(LINEAR))),
    "jacobian": lambda: O.to_dot(O.jacobian(poisoned(LINEAR), inputs=[bad_name("x")])),
    "jacobian of nothing": lambda: O.jacobian(poisoned(LINEAR), [bad_name("input")]),
    "hessian of a column": lambda: O.hessian(poisoned(TWO)),
    "hessian": lambda: O.hessian(poisoned(TWO), output=bad_name("y")),
    "hvp": lambda: O.hvp(poisoned(TWO), [bad_name("q")]),
    "jvp": lambda: O.jvp(poisoned(FOREIGN)),
    "vjp": lambda: O.vjp(poisoned(FOREIGN)),
    "batched": lambda: O.jacobian(poisoned(SORTED), inputs=[bad_name("x")]),
    "partition": lambda: O.partition(poisoned(LINEAR), [bad_name("q")]),
    "partition without rule": lambda: O.partition(poisoned(FOREIGN)),
    "check": lambda: str(O.check_gradient(poisoned(LINEAR))),
    "check without kernel": lambda: str(O.check_gradient(poisoned(FOREIGN))),
    "check with wrong input": lambda: O.check_gradient(poisoned(LINEAR), [bad_name("q")]),
    "initializer": lambda: O.add_initializer(poisoned(LINEAR), bad_name("w"), np.zeros(3)),
    "replace": lambda: O.replace_initializers_into_onnx(
        poisoned(LINEAR), {bad_name("q"): np.zeros(3)}
    ),
    "replace shape": lambda: O.replace_initializers_into_onnx(
        poisoned(LINEAR), {bad_name("w"): np.zeros(3)}
    ),
    "feed": lambda: O.random_feed(of_maps().graph.output),
    "select": lambda: O.select_model_inputs_outputs(poisoned(LINEAR), [bad_name("q")]),
    "select inputs": lambda: O.select_model_inputs_outputs(poisoned(TWO), None, [bad_name("h")]),
    "loss": lambda: O.add_loss_output(poisoned(TWO)),
    "loss of nothing": lambda: O.add_loss_output(poisoned(LINEAR), output_index=bad_name("q")),
    "loss of a name": lambda: O.add_loss_output(poisoned(LINEAR), bad_name("q")),
    "loss log": lambda: O.add_loss_output(poisoned(LINEAR), "log"),
    "loss with penalty": lambda: O.add_loss_output(
        poisoned(LINEAR), penalty={bad_name("q"): {"l1": 1}}
    ),
    "loss with null penalty": lambda: O.add_loss_output(
        poisoned(LINEAR), penalty={bad_name("w"): {"l1": 0}}
    ),
    "unreduced": lambda: O.unreduced_onnx_loss(poisoned(TWO)),
    "fit": lambda: fit_inner_trainer(LINEAR),
    "fit without rule": lambda: fit_inner_trainer(FOREIGN),
    "fit unknown": lambda: fit_inner_trainer(LINEAR, weights_to_train=[bad_name("q")]),
    "fit without loss": lambda: O.OrtGradientOptimizer(
        poisoned(LINEAR), loss_output_name=bad_name("q")
    ).fit(X, Y),
    "fit a loss of rows": lambda: O.OrtGradientOptimizer(
        poisoned(LINEAR), loss_output_name=bad_name("y")
    ).fit(X, Y),
    "fit on wrong data": lambda: fit_outer_trainer(LINEAR, X[:, :1]),
    "fit on text": lambda: fit_outer_trainer(LINEAR, np.array([[bad_name("a")] * 2] * 12)),
    "fit on NaN": lambda: fit_outer_trainer(LINEAR, X * np.nan),
    "fit on wrong names": lambda: fit_outer_trainer(TWO, {bad_name("q"): X}),
    "fit on wrong rows": lambda: fit_outer_trainer(LINEAR, X[:3]),
    "fit outside": lambda: fit_outer_trainer(LINEAR),
    "fit with penalty": lambda: fit_outer_trainer(LINEAR, learning_penalty={bad_name("q"): 1}),
    "fit diverges": lambda: fit_outer_trainer(LINEAR, learning_rate=1e30, max_iter=50),
    "fit diverges silently": lambda: fit_outer_trainer(
        LINEAR, learning_rate=1e30, max_iter=50, exc=False
    ),
    "fit on a device": lambda: fit_outer_trainer(LINEAR, device=bad_name("cuda")),
    "fit fails": lambda: O.OrtGradientForwardBackwardOptimizer(wrong_shapes()).fit(
        np.zeros((12, 3), np.float32), Y
    ),
    "fit with a weight unused": lambda: fit_inner_trainer(
        ROUNDED, weights_to_train=[bad_name("w"), bad_name("b")]
    ),
    "state": lambda: outer_trainer(LINEAR).fit(X, Y).set_state({bad_name("q"): 0}),
    "state of a shape": lambda: outer_trainer(LINEAR).fit(X, Y).set_state({bad_name("w"): 0}),
    "slots": lambda: (
        outer_trainer(LINEAR).fit(X, Y).set_state({bad_name("w"): {bad_name("q"): 0}}, "grad")
    ),
    "passes": lambda: run_passes(LINEAR, class_name=bad_name("Passes")),
    "passes without rule": lambda: run_passes(FOREIGN),
    "passes on wrong data": lambda: run_passes(LINEAR, [X]),
    "passes on wrong shapes": lambda: run_passes(LINEAR, [X[:, :1], X, X]),
    "passes on a dict": lambda: run_passes(LINEAR, {bad_name("x"): X}),
    "passes to a provider": lambda: run_passes(LINEAR, providers=[bad_name("q")]),
    "passes to a device": lambda: run_passes(LINEAR, providers=bad_name("cuda")),
    "passes of NaN": lambda: run_passes(
        LINEAR, [X * np.nan, np.ones((2, 1), "f"), np.ones(1, "f")], debug=True
    ),
    "passes fail": lambda: (
        O.OrtGradientForwardBackward(wrong_shapes())
        .new_instance()
        .forward([np.zeros((12, 3), np.float32), np.ones((2, 1), "f"), np.ones(1, "f")])
    ),
    "module": lambda: call_module(LINEAR, X),
    "module without rule": lambda: call_module(FOREIGN, X),
    "module on another name": lambda: call_module(LINEAR, **{bad_name("q"): 1}),
    "module twice": lambda: call_module(LINEAR, X, **{bad_name("x"): 1}),
    "module on a shape": lambda: call_module(LINEAR, X[:, :1]),
    "module on a dtype": lambda: call_module(LINEAR, X.astype(int)),
    "module of two lengths": lambda: call_module(TWO, X, X[:5]),
    "module with nothing": lambda: call_module(TWO),
    "module state": load_state,
    "function": lambda: O.function_onnx_graph(bad_name("q")),
    "optimizer": lambda: fit_outer_trainer(LINEAR, training_optimizer_name=bad_name("q")),
    "rate": lambda: fit_outer_trainer(LINEAR, learning_rate=bad_name("q")),
    "loader": lambda: O.OrtDataLoader(X, np.array([[bad_name("a")]] * 12)),
}


def texts_in(value) -> list[str]:
    if isinstance(value, str):
        return [value]
    return [t for v in value for t in texts_in(v)] if isinstance(value, (list, tuple)) else []


@pytest.mark.parametrize("call", CALLS)
def test_what_is_printed_and_raised(call, capfd, caplog):
    caplog.set_level(logging.DEBUG, "onnxgrad")
    texts = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            texts += texts_in(CALLS[call]())
        except Exception as e:
            while e is not None:
                texts.append(str(e))
                e = e.__cause__ or (None if e.__suppress_context__ else e.__context__)
    texts += [str(w.message) for w in seen]
    texts += caplog.messages
    texts += capfd.readouterr()
    for text in texts:
        clean(text)
        assert "\x1b" not in text


# -- the command line ------------------------------------------------------------------------------


@pytest.fixture
def folder_of_bad_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    onnx.save(dangling(), "dangling.onnx")
    for file, text in (("linear", LINEAR), ("foreign", FOREIGN), ("if", LOOP), ("two", TWO)):
        onnx.save(poisoned(text), f"{file}.onnx")
    np.savez("data.npz", **{bad_name("x"): X, "y": Y, bad_name("spare"): X})
    np.savez("two.npz", **{bad_name("x"): X, bad_name("z"): X, "y": Y, bad_name("spare"): X})
    np.savez("text.npz", **{bad_name("x"): np.array([[bad_name("a")] * 2] * 12), "y": Y})
    onnx.save(poisoned(LINEAR), bad_name("model"))
    return tmp_path


TRAIN = ("--target", "y", "--loss", "l2", "--epochs", "2", "--batch-size", "2", "--overwrite")
COMMANDS = [
    ("show", "linear.onnx"), ("show", "linear.onnx", "--grad"), ("show", "if.onnx", "--grad"),
    ("show", "foreign.onnx"), ("show", "foreign.onnx", "--grad"),
    ("show", "dangling.onnx", "--grad"),
    ("show", "two.onnx", "--grad", "--debug"), ("show", "foreign.onnx", "--grad", "--debug"),
    ("show", bad_name("model")),
    ("show", bad_name("nothing")),
    ("grad", "linear.onnx", "-o", "g.onnx"), ("grad", "if.onnx", "-o", bad_name("out.onnx")),
    ("grad", "foreign.onnx", "-o", "g.onnx"),
    ("grad", "two.onnx", "-o", bad_name("/nowhere/g.onnx")),
    ("grad", "linear.onnx", "-o", bad_name("model")),
    ("grad", "linear.onnx", "-o", "g.onnx", "--weights", bad_name("q")),
    ("grad", "linear.onnx", "-o", "g.onnx", "--inputs", bad_name("q"), "--debug"),
    ("train", "linear.onnx", "data.npz", *TRAIN),
    ("train", "two.onnx", "two.npz", *TRAIN, "--output-index", bad_name("y"),
     "--output", bad_name("t.onnx")),
    ("train", "two.onnx", "two.npz", *TRAIN),
    ("train", "two.onnx", "two.npz", *TRAIN, "--output-index", bad_name("q")),
    ("train", "two.onnx", "data.npz", *TRAIN, "--output-index", bad_name("y")),
    ("train", "foreign.onnx", "data.npz", *TRAIN),
    ("train", "linear.onnx", "text.npz", *TRAIN),
    ("train", "linear.onnx", "data.npz", *TRAIN, "--weights", bad_name("q")),
    ("train", "linear.onnx", "data.npz", *TRAIN, "--loss", bad_name("q")),
    ("train", "linear.onnx", "data.npz", *TRAIN, "--loss-option", bad_name("q=1")),
    ("train", "linear.onnx", "data.npz", *TRAIN, "--target", bad_name("q")),
    ("train", "linear.onnx", "data.npz", "--target", bad_name("spare"), "--loss-output",
     bad_name("q")),
    ("train", "linear.onnx", "data.npz", "--target", bad_name("q"), "--loss-output", bad_name("y")),
    ("train", "linear.onnx", "data.npz", *TRAIN, "--learning-rate", "1e30", "--epochs", "50"),
    ("train", "linear.onnx", bad_name("nothing.npz"), *TRAIN),
]  # fmt: skip


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda a: " ".join(a[:2]).replace(BAD, "!"))
def test_the_command_line(folder_of_bad_names, capfd, arguments):
    made = CliRunner().invoke(app, list(arguments))
    clean(made.output)
    e = made.exception
    if not isinstance(e, SystemExit):
        assert e is None or "--debug" in arguments, e
        while e is not None:
            clean(str(e))
            e = e.__cause__ or (None if e.__suppress_context__ else e.__context__)
    for text in capfd.readouterr():
        clean(text)


def test_markup_in_names_is_text(tmp_path):
    made = model_of_names(LINEAR)
    made.graph.input[0].name = made.graph.node[0].input[0] = "[red]x[/red]"
    made.graph.node[1].op_type, made.graph.node[1].domain = "Add", ""
    onnx.save(made, tmp_path / "m.onnx")
    done = CliRunner().invoke(app, ["grad", str(tmp_path / "m.onnx"), "-o", str(tmp_path / "[b]g")])
    assert "[red]x[/red]_grad" in done.output
    assert "[b]g" in done.output


def test_names_are_kept_in_models():
    made = onnxgrad.onnx_derivative(poisoned(LINEAR))
    assert [x.name for x in made.graph.input][:2] == [bad_name("x"), bad_name("w")]
    session = ort.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    assert session.get_inputs()[0].name == bad_name("x")
