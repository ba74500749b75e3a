"""Reverse mode explained
======================

This page computes gradients of ONNX models in reverse mode, the method behind `loss.backward()` in
PyTorch and `jax.grad`, with no more than `onnx`, `numpy` and `onnxruntime`. The page begins with a
single `Add` and ends with the training of a small network. At the end, the gradients of the small
network are compared with the gradients of onnxgrad, and a list says what onnxgrad does beyond this
page.

This page is one Python file, which runs from top to bottom: `python docs/tutorials/explained.py`.
"""

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

# %%
# A graph is a list of nodes
# --------------------------
#
# An ONNX model is a list of nodes. A node has an operator, such as `Add`, the names of the values
# that it reads, and the name of the value that it computes. (Some operators compute several values;
# the operators of this page compute one value each.) A node reads inputs of the model and outputs
# of earlier nodes, so the nodes can be run one after the other, from first to last.
#
# The class `Graph` is a list of nodes. `Graph.add` appends a node and returns the name of its
# output, which later nodes read. `Graph.model` returns an ordinary ONNX model of the nodes.
# `Graph.shapes` asks onnx for the shape of every value. All numbers are float64, to make rounding
# errors small, and all shapes are fixed.


class Graph:
    """A list of nodes that can be extended; `inputs` is {name: shape}."""

    def __init__(self, inputs):
        self.inputs = inputs
        self.nodes = []

    def add(self, op_type, *inputs, output=None, **attributes):
        """Append a node and return the name of its output."""
        output = output or f"{op_type}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, inputs, [output], **attributes))
        return output

    def constant(self, array):
        """Append a constant and return its name."""
        return self.add("Constant", value=numpy_helper.from_array(np.asarray(array)))

    def model(self, *outputs):
        """Return the ONNX model that computes `outputs`."""
        double, describe = TensorProto.DOUBLE, helper.make_tensor_value_info
        inputs = [describe(name, double, shape) for name, shape in self.inputs.items()]
        results = [describe(name, double, self.shapes()[name]) for name in outputs]
        graph = helper.make_graph(self.nodes, "explained", inputs, results)
        opset = helper.make_opsetid("", 18)
        return helper.make_model(graph, opset_imports=[opset], ir_version=9)

    def shapes(self):
        """Return the shape of every value: {name: shape}."""
        inferred = onnx.shape_inference.infer_shapes(self.model(), strict_mode=True).graph
        values = [*inferred.input, *inferred.value_info]
        return {v.name: tuple(d.dim_value for d in v.type.tensor_type.shape.dim) for v in values}


def run(model, feeds):
    """Run a model on arrays; return {name of output: array}."""
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [y.name for y in model.graph.output]
    return dict(zip(names, session.run(names, feeds), strict=True))


# %%
# One node
# --------
#
# Let `y = a + b`, and let a number L, the loss, depend on `y` in some way. The gradient of L with
# respect to `y` is an array of the shape of `y`: each element says how fast L grows when that
# element of `y` grows. The gradient of L with respect to `y` is called `y_grad` on this page. Other
# texts call `y_grad` the cotangent or the adjoint of `y`.
#
# How fast does L grow with `a`? When an element of `a` grows by a small amount, the same element of
# `y` grows by just as much. So the gradient of L with respect to `a` is `y_grad`, and the same
# holds for `b`. Computing the gradients of `a` and `b` from `y_grad` is the chain rule, which needs
# no knowledge of what happens between `y` and L. The gradients of `a` and `b` can be written as
# nodes, with `y_grad` as one more input of the model:

graph = Graph({"a": (2,), "b": (2,), "y_grad": (2,)})
graph.add("Add", "a", "b", output="y")
graph.add("Identity", "y_grad", output="a_grad")
graph.add("Identity", "y_grad", output="b_grad")

# %%
# Let L be the sum of 5 times the first element of `y` and 7 times the second. Then `y_grad` is [5,
# 7], and the gradients of `a` and `b` are [5, 7], too. The gradients of an `Add` do not depend on
# the values of `a` and `b`.

feeds = {"a": np.array([1.0, 2.0]), "b": np.array([3.0, 4.0]), "y_grad": np.array([5.0, 7.0])}
one_node = run(graph.model("y", "a_grad", "b_grad"), feeds)
assert one_node["y"].tolist() == [4, 6]
assert one_node["a_grad"].tolist() == one_node["b_grad"].tolist() == [5, 7]

# %%
# Rules
# -----
#
# A *rule* writes the gradients of one operator. A rule takes the graph, a node, and the name `g` of
# the gradient of the node's output. The rule appends nodes that compute the gradients of the node's
# inputs, and returns the names of these gradients, one name for each input.


def add_rule(graph, node, g):
    """y = a + b:  da = g,  db = g."""
    return [g, g]


def sub_rule(graph, node, g):
    """y = a - b:  da = g,  db = -g."""
    return [g, graph.add("Neg", g)]


# %%
# In a product `a * b`, when an element of `a` grows by a small d, the product grows by d times the
# element of `b`. The slope of the product with respect to `a` is `b`, and its slope with respect to
# `b` is `a`. A rule may read the inputs and outputs of its node, because all of them are values of
# the same graph.


def mul_rule(graph, node, g):
    """y = a b:  da = g b,  db = g a."""
    a, b = node.input
    return [graph.add("Mul", g, b), graph.add("Mul", g, a)]


# %%
# `RULES` lists the rules by operator. A `Constant` has no inputs, so its rule returns no gradients.

RULES = {"Add": add_rule, "Sub": sub_rule, "Mul": mul_rule, "Constant": lambda graph, node, g: []}

# %%
# Broadcasting
# ------------
#
# `Add` and `Mul` also accept operands of different shapes. With `a` of shape (4, 3) and `b` of
# shape (3,), each element of `b` is added to four elements of `a`. When an element of `b` grows,
# four elements of `y` grow, and the effects on L add up. So the gradient of `b` is the sum of `g`
# over the axis along which `b` was repeated: where the forward pass repeats, the backward pass
# sums.
#
# `sum_to` computes the sum of `g` over the repeated axes of `x`: the axes that `x` lacks, and the
# axes along which `x` has length 1 and `g` has another length. If the shapes of `x` and `g` are
# equal, there is nothing to sum.


def sum_to(graph, g, x):
    """Return `g` summed over the axes along which `x` was repeated, in the shape of `x`."""
    shapes = graph.shapes()
    if shapes[g] == shapes[x]:
        return g
    lacking = len(shapes[g]) - len(shapes[x])
    padded = (None,) * lacking + shapes[x]
    axes = [i for i, length in enumerate(shapes[g]) if padded[i] != length]
    summed = graph.add("ReduceSum", g, graph.constant(axes), keepdims=1)
    return graph.add("Reshape", summed, graph.constant(np.array(shapes[x], np.int64)))


# %%
# Many nodes: the walk in reverse
# -------------------------------
#
# In a graph of many nodes, start with the gradient of the output `y`, and visit the nodes from last
# to first. At each node, the rule turns the gradient of the node's output into gradients of its
# inputs. An input that is the output of an earlier node now has the gradient that the rule of that
# node needs. At the end, the gradient has reached the inputs of the graph.
#
# A value may be read by several nodes, or twice by one node. The gradient of the value is a sum
# with one term for each read, because the effects of all reads on L add up. The gradient of a value
# is complete before a rule needs it: every node that reads a value comes after the node that
# computes the value, and so the walk in reverse visits all readers first. A node whose output has
# no gradient is skipped.


def differentiate(graph, y, y_grad):
    """Append the nodes of the gradient; return {name of value: name of its gradient}."""
    gradients = {y: y_grad}
    for node in reversed(list(graph.nodes)):
        g = gradients.get(node.output[0])
        if g is None:
            continue
        terms = RULES[node.op_type](graph, node, g)
        for x, term in zip(node.input, terms, strict=True):
            if term is None:
                continue
            term = sum_to(graph, term, x)
            gradients[x] = graph.add("Add", gradients[x], term) if x in gradients else term
    return gradients


# %%
# The function `differentiate` is all of reverse mode. An operator without a rule raises a
# `KeyError`, because without its rule the gradient would be wrong. The cost is small: a rule
# appends a few nodes, so that the gradients with respect to *all* inputs together cost a small
# multiple of computing `y`, however many inputs there are.
#
# Usually `y` is the loss itself, and the gradient of the loss with respect to itself is 1.
# `add_gradients` starts with 1 as the gradient of the loss. The gradient with respect to a value
# `x` gets the name `x_grad`.


def add_gradients(graph, loss, wrt):
    """Append the gradients of `loss`, one number, with respect to `wrt`; return their names."""
    gradients = differentiate(graph, loss, graph.constant(np.ones(graph.shapes()[loss])))
    return [graph.add("Identity", gradients[x], output=f"{x}_grad") for x in wrt]


# %%
# As an example, take y = x x x (x cubed), in which `x` is read three times. The slope is 3 x²,
# which is 12 at x = 2: each of the three reads adds 4.

graph = Graph({"x": ()})
y = graph.add("Mul", graph.add("Mul", "x", "x"), "x")
[slope] = add_gradients(graph, y, ["x"])
cubic = run(graph.model(slope), {"x": np.array(2.0)})
assert cubic[slope] == 12

# %%
# The gradient consists of nodes in the same graph, so it can be differentiated like any other
# value. The second derivative is 6 x. The nodes of the gradient are `Mul`, `Add` and `Identity`,
# and `Identity` still needs a rule:

RULES["Identity"] = lambda graph, node, g: [g]
second = differentiate(graph, slope, graph.constant(1.0))["x"]
assert run(graph.model(second), {"x": np.array(2.0)})[second] == 12

# %%
# More rules
# ----------
#
# For a product of matrices, y_ij is the sum of a_ik b_kj over k. The element a_ik enters all y_ij
# of row i, with the slope b_kj, so the gradient of a_ik is the sum of g_ij b_kj over j: the
# gradient of `a` is the product of `g` and the transpose of `b`. In the same way, the gradient of
# `b` is the product of the transpose of `a` and `g`.


def matmul_rule(graph, node, g):
    """y = a b:  da = g bᵀ,  db = aᵀ g."""
    a, b = (graph.add("Transpose", x, perm=[1, 0]) for x in node.input)
    return [graph.add("MatMul", g, b), graph.add("MatMul", a, g)]


# %%
# The rule of a function of each element multiplies `g` by the slope of the function. The slope of
# tanh is 1 - tanh², and the forward pass has already computed tanh, so the rule reads the output of
# its node.


def tanh_rule(graph, node, g):
    """y = tanh(x):  dx = g (1 - y²)."""
    (y,) = node.output
    slope = graph.add("Sub", graph.constant(1.0), graph.add("Mul", y, y))
    return [graph.add("Mul", g, slope)]


# %%
# The slope of Relu is 1 where x is positive and 0 where x is negative, which is the sign of the
# output. At x = 0 there is no slope: any number from 0 to 1 would do. The sign gives 0, and PyTorch
# also takes 0.


def relu_rule(graph, node, g):
    """y = max(x, 0):  dx = g where y > 0, else 0."""
    return [graph.add("Mul", g, graph.add("Sign", node.output[0]))]


# %%
# A sum is the reverse of broadcasting: where the forward pass sums, the backward pass repeats.
# Every element that goes into a sum has the slope 1, so `g` is expanded to the shape of `x`. The
# second input of `ReduceSum` is the axes to sum over. The axes are integers and have no gradient,
# so the rule returns None for the second input. If the sum removes some axes from the shape,
# `Expand` could repeat along the wrong axes; the rule does not cover this case, and raises an
# error.


def sum_rule(graph, node, g):
    """y = the sum of x over all axes, or over some with keepdims=1:  dx = g, repeated."""
    shapes, x = graph.shapes(), node.input[0]
    if len(shapes[g]) not in (0, len(shapes[x])):
        raise NotImplementedError(f"{node.output[0]}: ReduceSum over some axes with keepdims=0")
    repeated = graph.add("Expand", g, graph.constant(np.array(shapes[x], np.int64)))
    return [repeated] + [None] * (len(node.input) - 1)


RULES |= {"MatMul": matmul_rule, "Tanh": tanh_rule, "Relu": relu_rule, "ReduceSum": sum_rule}

# %%
# Is it right?
# ------------
#
# A gradient can be checked without any rule. Increase one element of an input by a small h,
# decrease this element by h, and divide the difference of the two losses by 2 h. The error of such
# a *central difference* is of the order of h². A central difference needs two runs of the model for
# every single element. Central differences are too slow for training, but they are a test that does
# not depend on any rule.


def central_differences(model, feeds, x, h=1e-5):
    """Return the gradient of the model's first output with respect to input `x`."""
    session, gradient = ort.InferenceSession(model.SerializeToString()), np.zeros_like(feeds[x])
    for index in np.ndindex(gradient.shape):
        step = np.zeros_like(gradient)
        step[index] = h
        up, down = (session.run(None, feeds | {x: feeds[x] + d})[0] for d in (step, -step))
        gradient[index] = (up.item() - down.item()) / (2 * h)
    return gradient


# %%
# The graph of this test has every operator that has a rule on this page: `c` is a row that is added
# to every row of a product, and the sum `s` is read twice.

rng = np.random.default_rng(0)
shapes = {"a": (4, 2), "b": (2, 3), "c": (3,)}
feeds = {x: rng.standard_normal(shape) for x, shape in shapes.items()}
graph = Graph(shapes)
s = graph.add("Add", graph.add("MatMul", "a", "b"), "c")
product = graph.add("Mul", graph.add("Relu", s), graph.add("Tanh", s))
columns = graph.add("ReduceSum", product, graph.constant([0]), keepdims=1)
loss = graph.add("ReduceSum", graph.add("Sub", columns, product), keepdims=0)
every_rule = run(graph.model(*add_gradients(graph, loss, shapes)), feeds)
for x in shapes:
    expected = central_differences(graph.model(loss), feeds, x)
    np.testing.assert_allclose(every_rule[f"{x}_grad"], expected, atol=1e-8)

# %%
# A network
# ---------
#
# Now follows a network of two layers. The network predicts one number from the two numbers of a row
# of `x`, by 16 hidden units. The weights `W1`, `b1`, `W2` and `b2` are inputs of the model, so that
# they can change from run to run. The loss is the mean of the squared errors over 64 rows.

ROWS, HIDDEN = 64, 16
WEIGHTS = {"W1": (2, HIDDEN), "b1": (HIDDEN,), "W2": (HIDDEN, 1), "b2": (1,)}


def network(**more_inputs):
    """Return a graph with the values `prediction` and `loss`."""
    graph = Graph({"x": (ROWS, 2), "label": (ROWS, 1)} | WEIGHTS | more_inputs)
    hidden = graph.add("Tanh", graph.add("Add", graph.add("MatMul", "x", "W1"), "b1"))
    graph.add("Add", graph.add("MatMul", hidden, "W2"), "b2", output="prediction")
    error = graph.add("Sub", "prediction", "label")
    total = graph.add("ReduceSum", graph.add("Mul", error, error), keepdims=0)
    graph.add("Mul", total, graph.constant(1 / ROWS), output="loss")
    return graph


# %%
# The gradient of the loss is a model with one output for each weight:

graph = network()
gradient_model = graph.model(*add_gradients(graph, "loss", WEIGHTS))

# %%
# A training step
# ---------------
#
# Gradient descent subtracts from each weight its gradient times a small number, the learning rate.
# Gradient descent takes two more nodes for each weight, `Mul` and `Sub`. The resulting model
# computes a whole training step: its inputs are the rows, the weights and the learning rate, and
# its outputs are the loss and the new weights.

graph = network(rate=())
steps = []
for w, g in zip(WEIGHTS, add_gradients(graph, "loss", WEIGHTS), strict=True):
    steps.append(graph.add("Sub", w, graph.add("Mul", "rate", g), output=f"{w}_new"))
step_model = graph.model("loss", *steps)

# %%
# Training
# --------
#
# The rows are 64 points of a square, and the label of a row is the product of its two coordinates,
# which no linear function comes close to. The weights begin at random. Each iteration runs the
# step, and its new weights are the inputs of the next iteration.

data = {"x": rng.uniform(-1, 1, (ROWS, 2))}
data["label"] = data["x"][:, :1] * data["x"][:, 1:]
first_weights = {w: rng.standard_normal(shape) for w, shape in WEIGHTS.items()}


def train(weights, rate, iterations):
    """Return the loss of each iteration, and the weights after the last one."""
    session = ort.InferenceSession(step_model.SerializeToString())
    losses = []
    for _ in range(iterations):
        loss, *arrays = session.run(None, data | weights | {"rate": np.array(rate)})
        weights = dict(zip(WEIGHTS, arrays, strict=True))
        losses.append(loss.item())
    return losses, weights


losses, weights = train(first_weights, rate=0.1, iterations=2000)
assert losses[-1] < 0.001
print(f"the loss falls from {losses[0]:.3f} to {losses[-1]:.6f}")

# %%
# The same by onnxgrad
# --------------------
#
# `onnx_derivative` takes the model of the loss and returns a model of the gradients. The gradients
# of onnxgrad and the gradients of this page agree with each other, and with central differences.

from onnxgrad import DerivativeOptions, onnx_derivative

loss_model = network().model("loss")
options = DerivativeOptions.FillGrad | DerivativeOptions.KeepOutputs
package = run(onnx_derivative(loss_model, inputs=list(WEIGHTS), options=options), data | weights)
page = run(gradient_model, data | weights)
for w in WEIGHTS:
    np.testing.assert_allclose(page[f"{w}_grad"], package[f"{w}_grad"], rtol=1e-6, atol=1e-9)
    expected = central_differences(loss_model, data | weights, w)
    np.testing.assert_allclose(page[f"{w}_grad"], expected, rtol=1e-6, atol=1e-9)

# %%
# What onnxgrad adds
# ------------------
#
# onnxgrad has a counterpart for each piece of code on this page: `Emit` writes nodes,
# `onnxgrad/operators` has one rule for each operator, and `sweep` in `onnxgrad/autodiff/reverse.py`
# is the walk in reverse. Beyond this page, the package has:
#
# - **Unknown shapes.** On this page, `sum_to` asks for shapes while the graph is written. In most
#   models the count of rows, at least, is a symbol such as `N`, and some shapes depend on the data.
#   If a shape is not static, nodes of the gradient model compute the axes to sum over when the
#   model runs.
# - **Every operator.** The package has rules for all differentiable tensor operators, with all
#   values of their attributes. A few operators are first rewritten as other operators, and local
#   functions are inlined. An operator without a rule raises an error that names the node. Operators
#   that have no gradient, such as `Shape`, are declared to have none.
# - **Subgraphs.** `If`, `Loop` and `Scan` contain graphs of their own, which may also read values
#   of the graph that contains them. The gradient of a loop is another loop, over the iterations in
#   reverse order, which reads the state at the start of each iteration.
# - **Saved values.** The rules of this page read values of the forward pass, and one model has both
#   passes. In a program where something else comes between the passes, such as a loss in PyTorch,
#   `partition` makes a forward model and a backward model. `partition` decides by a minimum cut of
#   the graph which values the forward model saves, and which values the backward model computes
#   again.
# - **Fewer nodes.** onnxgrad removes the nodes that no output of the gradient model depends on.
# - **Training without Python.** On this page, each step is a call, and the weights pass through
#   Python. onnxgrad puts the step into a `Scan` over the batches, so that one call trains on many
#   batches. The weights are read from the file of the model and written back to the file.
