"""What the faces for PyTorch, JAX and PyTensor share: a model as a function of inputs and weights.

`function_model.py` turns the weights of a file into inputs of its graph, and `passes.py` has the
models of its passes: the forward model, the backward model, tangents, and the gradient as a
function that can be differentiated again. `host_graph.py` runs them on arrays of the host, and
checks the shapes of inputs.
"""
