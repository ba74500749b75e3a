"""Linear regression with the loss in the model
============================================

``add_loss_output`` adds a loss to a model, ``OrtGradientOptimizer`` trains it, and
``get_trained_onnx`` returns the model as it was, with new coefficients: here, they are attributes
of an operator of ``ai.onnx.ml``. The result is compared with scikit-learn.
"""

import matplotlib.pyplot as plt
import numpy as np
from rich.console import Console
from rich.table import Table
from skl2onnx import to_onnx
from sklearn.datasets import make_regression
from sklearn.linear_model import LinearRegression, SGDRegressor
from sklearn.model_selection import train_test_split

from onnxgrad.compat import (
    OrtGradientOptimizer,
    add_loss_output,
    get_train_initializer,
    onnx_simple_text_plot,
    plot_onnxs,
)

X, y = make_regression(400, n_features=2, bias=2, noise=5, random_state=0)
X, y = X.astype(np.float32), y.astype(np.float32)
X_train, X_test, y_train, y_test = train_test_split(X, y, random_state=0)

# %%
# The model is a regression of scikit-learn that has seen five rows only. With the loss, the graph
# has a second input, the labels, and a second output, the loss.

onx = to_onnx(LinearRegression().fit(X_train[:5], y_train[:5]), X_train[:1], target_opset=15)
onx_loss = add_loss_output(onx)
print(onnx_simple_text_plot(onx_loss))
plot_onnxs(onx, onx_loss, title=["linear regression", "with its loss"])
plt.show()

# %%
# What trains are the coefficients and the intercept. The trainer shuffles the rows and updates the
# weights after every batch. The loss of the test rows is computed after every epoch.

weights = list(get_train_initializer(onx))
trainer = OrtGradientOptimizer(
    onx_loss, weights, learning_rate=1e-2, validation_every=1, random_state=0
)
trainer.fit(X_train, y_train, X_val=X_test, y_val=y_test)
plt.figure(layout="constrained")
plt.semilogy(trainer.train_losses_, label="training rows")
plt.semilogy(trainer.validation_losses_, label="test rows")
plt.xlabel("epoch")
plt.ylabel("mean squared error")
plt.legend()
plt.show()

# %%
# The trained file has the nodes of the original.

print(onnx_simple_text_plot(trainer.get_trained_onnx(onx)))

# %%
# Least squares and stochastic gradient descent of scikit-learn arrive at the same numbers, up to
# the noise of the last batches.

exact = LinearRegression().fit(X_train, y_train)
sgd = SGDRegressor(penalty=None, eta0=1e-2, random_state=0).fit(X_train, y_train)
found = np.concatenate(list(trainer.trained_coef_.values()))
table = Table("", "coefficient 0", "coefficient 1", "intercept")
for name, numbers in (
    ("least squares", [*exact.coef_, exact.intercept_]),
    ("SGDRegressor", [*sgd.coef_, *sgd.intercept_]),
    ("onnxgrad", found),
):
    table.add_row(name, *(f"{number:.3f}" for number in numbers))
Console().print(table)
np.testing.assert_allclose(found, [*exact.coef_, exact.intercept_], atol=0.3)
