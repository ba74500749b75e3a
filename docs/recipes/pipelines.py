"""
A pipeline of scikit-learn in one file
======================================

A table with numbers, missing values and text: imputer, scaler, one-hot encoder and logistic
regression are one pipeline, and one ONNX file. When the world changes, the file goes on training on
new rows, and stays one file with the same inputs.
"""

import matplotlib.pyplot as plt
import numpy as np
import onnxruntime
import pandas as pd
from skl2onnx import to_onnx
from sklearn.compose import make_column_transformer
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

import onnxgrad as og

rng = np.random.default_rng(0)


def rows(count, effect):
    """Return a table, and whether each customer buys; `effect` is that of the age."""
    age, city = rng.uniform(20, 70, count), rng.choice(["Bern", "Lyon", "Turin"], count)
    score = effect * (age - 45) / 10 + (city == "Lyon") - (city == "Turin")
    table = pd.DataFrame({"age": age.astype(np.float32), "city": city})
    table.loc[rng.random(count) < 0.1, "age"] = np.nan
    return table, (score + rng.logistic(size=count) > 0).astype(np.int64)


old, new, test = rows(2000, 1.0), rows(2000, -1.0), rows(2000, -1.0)
pipeline = make_pipeline(
    make_column_transformer(
        (make_pipeline(SimpleImputer(), StandardScaler()), ["age"]), (OneHotEncoder(), ["city"])
    ),
    LogisticRegression(),
).fit(*old)
model = to_onnx(pipeline, old[0], options={"zipmap": False})
print(og.trainable(model))  # the scaler stays, the regression trains

# %%
# New rows train it further. The result is compared with a pipeline that is fitted to them.

clf = og.OnnxClassifier(model, learning_rate=0.1, random_state=0)
scores = [clf.partial_fit(*new).score(*test) for _ in range(10)]
print(f"accuracy {pipeline.score(*test):.3f} before, {scores[-1]:.3f} after")

feed = {name: test[0][[name]].to_numpy() for name in ("age", "city")}
session = onnxruntime.InferenceSession(clf.to_onnx().SerializeToString())
np.testing.assert_array_equal(session.run(["label"], feed)[0], clf.predict(test[0]))
assert abs(scores[-1] - pipeline.fit(*new).score(*test)) < 0.02

plt.plot(range(1, 11), scores)
plt.gca().set(xlabel="epochs on new rows", ylabel="accuracy")
plt.show()
