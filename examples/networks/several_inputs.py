"""Several inputs: a recommender
=============================

A model with several inputs takes a dict of arrays: the keys are the names of the inputs. The
recommender of this page reads the index of a user and the index of an item. The recommender has a
vector for every user and every item, and predicts the user's rating of the item as the inner
product of their vectors.
"""

import matplotlib.pyplot as plt
import numpy as np
import onnx

import onnxgrad as og

rng = np.random.default_rng(0)
USERS, ITEMS, RANK = 120, 80, 3
model = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 20]>
    recommender (int64[N] user, int64[N] item) => (float[N,1] rating) <int64[1] last = {1}> {
        u = Gather(users, user)  i = Gather(items, item)
        product = Mul(u, i)  rating = ReduceSum(product, last)
    }
""")
for name, count in (("users", USERS), ("items", ITEMS)):
    array = rng.normal(scale=0.5, size=(count, RANK)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
print(og.trainable(model))

# %%
# A fifth of the ratings is known, and trains the model. The ratings that the model does not train
# on are for the validation.

truth = (rng.normal(size=(USERS, RANK)) @ rng.normal(size=(RANK, ITEMS))).astype(np.float32)
user, item = np.divmod(rng.permutation(USERS * ITEMS), ITEMS)
ratings = truth[user, item][:, None]
known, unknown = slice(0, len(user) // 5), slice(len(user) // 5, None)

trainer = og.Trainer(
    model,
    "mse",
    optimizer=og.optimizers.adamw(weight_decay=0.01),
    learning_rate=0.02,
    metrics=["r2"],
)
trainer.fit(
    {"user": user[known], "item": item[known]},
    ratings[known],
    epochs=60,
    validation=({"user": user[unknown], "item": item[unknown]}, ratings[unknown]),
)
print(trainer.history[-1])
assert trainer.history[-1]["validation_r2"] > 0.95

# %%
# The predictions of the ratings that were not in the training.

predicted = trainer.predict({"user": user[unknown], "item": item[unknown]})
plt.plot(ratings[unknown], predicted, ".", markersize=2)
plt.xlabel("rating that was not in the training")
plt.ylabel("prediction")
plt.show()
