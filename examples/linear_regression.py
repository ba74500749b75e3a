"""A linear regression with its loss in the model, against scikit-learn's.

`add_loss_output` adds the loss, `OrtGradientOptimizer` trains, and `get_trained_onnx` returns the
model as it came but for its coefficients, which are attributes of an ai.onnx.ml operator.
"""

import matplotlib.pyplot as plt
import numpy as np
from onnxruntime import InferenceSession
from skl2onnx import to_onnx
from sklearn.datasets import make_regression
from sklearn.linear_model import LinearRegression, SGDRegressor
from sklearn.model_selection import train_test_split

from onnxgrad import (
    OrtGradientOptimizer,
    add_loss_output,
    get_train_initializer,
    onnx_simple_text_plot,
    plot_onnxs,
)

X, y = make_regression(400, n_features=2, bias=2, noise=5, random_state=0)
X, y = X.astype(np.float32), y.astype(np.float32)
X_train, X_test, y_train, y_test = train_test_split(X, y, random_state=0)

# A regression that knows of five rows only.
onx = to_onnx(LinearRegression().fit(X_train[:5], y_train[:5]), X_train[:1], target_opset=15)
onx_loss = add_loss_output(onx)
print(onnx_simple_text_plot(onx_loss))
plot_onnxs(onx, onx_loss, title=["linear regression", "with its loss"])
plt.savefig("linear_regression_graphs.png")

weights = get_train_initializer(onx)
print("\nWeights:", {name: array for name, (array, _) in weights.items()})
session = InferenceSession(onx_loss.SerializeToString())
loss = session.run(["loss"], {"X": X_test, "label": y_test.reshape(-1, 1)})[0].item()
print(f"Mean loss of the test rows before: {loss / len(X_test):.3f}")

trainer = OrtGradientOptimizer(onx_loss, list(weights), learning_rate=1e-2, random_state=0)
trainer.fit(X_train, y_train, X_val=X_test, y_val=y_test)
print("Losses of the last epochs:", trainer.train_losses_[-3:])
print("Losses of the test rows:", trainer.validation_losses_[-3:])
print("\n" + onnx_simple_text_plot(trainer.get_trained_onnx(onx)))

sgd = SGDRegressor(penalty=None, eta0=1e-2, random_state=0).fit(X_train, y_train)
exact = LinearRegression().fit(X_train, y_train)
found = np.concatenate(list(trainer.trained_coef_.values()))
for name, coef in (
    ("scikit-learn, least squares", [*exact.coef_, exact.intercept_]),
    ("scikit-learn, SGDRegressor", [*sgd.coef_, *sgd.intercept_]),
    ("onnxgrad", found),
):
    print(f"{name:28}", np.round(coef, 3))
np.testing.assert_allclose(found, [*exact.coef_, exact.intercept_], atol=0.3)
