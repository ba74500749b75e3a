"""The functions of a training loop, by numpy and by onnxruntime
=============================================================

A training loop is made of small functions: a weighted sum, a loss with its gradient, a penalty.
``function_onnx_graph`` writes them as models. Here they are compared with numpy, in results and in
time.
"""

import time
from statistics import median

import matplotlib.pyplot as plt
import numpy as np
from onnxruntime import InferenceSession, OrtValue
from rich.console import Console
from rich.table import Table

from onnxgrad.compat import function_onnx_graph, get_supported_functions

FUNCTIONS = {
    "axpy": lambda x1, x2, alpha: [alpha * x1 + x2],
    "axpyw": lambda x1, x2, g, alpha, beta: [x2 + beta * g + alpha * x1, beta * g + alpha * x1],
    "copy": lambda x: [x.copy()],
    "grad_loss_square_error": lambda y, f: [np.sum((y - f) ** 2), 2 * (f - y)],
    "grad_loss_absolute_error": lambda y, f: [np.sum(np.abs(y - f)), np.sign(f - y)],
    "update_penalty_elastic_error": lambda x: [x - 1e-4 * np.sign(x) - 2e-4 * x],
}
table = Table("function", "what it computes")
for name in FUNCTIONS:
    table.add_row(name, get_supported_functions()[name].splitlines()[0])
Console().print(table)


# %%
# "bind" leaves inputs and outputs where they are, as a training loop does. A time is that of one
# call, the median of many.


def microseconds(function, *arguments):
    times = []
    for _ in range(300):
        begin = time.perf_counter()
        function(*arguments)
        times.append(time.perf_counter() - begin)
    return median(times) * 1e6


rng = np.random.default_rng(0)
table = Table("function", "rows", "numpy, µs", "onnxruntime, µs", "bind, µs")
times = {}
for name, in_numpy in FUNCTIONS.items():
    session = InferenceSession(function_onnx_graph(name).SerializeToString())
    for rows in (10, 1000):
        feed = {
            x.name: rng.standard_normal(x.shape if x.shape == [1] else (rows, 10), np.float32)
            for x in session.get_inputs()
        }
        for found, expected in zip(session.run(None, feed), in_numpy(*feed.values())):
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
        binding = session.io_binding()
        for key, value in feed.items():
            binding.bind_ortvalue_input(key, OrtValue.ortvalue_from_numpy(value))
        for y in session.get_outputs():
            binding.bind_output(y.name)
        times[name, rows] = (
            microseconds(in_numpy, *feed.values()),
            microseconds(session.run, None, feed),
            microseconds(session.run_with_iobinding, binding),
        )
        table.add_row(name, str(rows), *(f"{t:.1f}" for t in times[name, rows]))
Console().print(table)

# %%
# The larger the arrays, the smaller the share of the call itself.

plt.figure(layout="constrained")
for i, name in enumerate(("numpy", "onnxruntime", "onnxruntime, bound")):
    column = [row[i] for (_, rows), row in times.items() if rows == 1000]
    plt.barh(np.arange(len(column)) + 0.25 * i, column, 0.25, label=name)
plt.yticks(np.arange(len(FUNCTIONS)) + 0.25, FUNCTIONS)
plt.xlabel("µs for 1000 rows")
plt.legend()
plt.show()
