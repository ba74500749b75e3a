"""A text classifier goes on training
==================================

A pipeline of scikit-learn, ``TfidfVectorizer`` and a linear classifier, is one file that takes
texts. The meaning of a word changes ("sick" becomes praise), and the linear part trains on new
texts. ``partial_fit`` of scikit-learn has the same result.
"""

import matplotlib.pyplot as plt
import numpy as np
import onnxruntime
from skl2onnx import to_onnx
from skl2onnx.common.data_types import StringTensorType
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import SGDClassifier
from sklearn.pipeline import make_pipeline

import onnxgrad as og

rng = np.random.default_rng(0)
OTHERS = "the film plot cast scene and very rather music end".split()


def reviews(count, bad, good):
    """Return texts with two words of one kind, and labels: 1 for good."""
    y = rng.integers(0, 2, count)
    words = [[*rng.choice(OTHERS, 5), *rng.choice([bad, good][label], 2)] for label in y]
    return np.array([" ".join(text) for text in words], object), y


texts, y = reviews(300, ["awful", "boring", "sick"], ["great", "fun", "moving"])
new_texts, new_y = reviews(300, ["awful", "boring"], ["great", "fun", "sick"])
test_texts, test_y = reviews(200, ["awful", "boring"], ["great", "fun", "sick"])
print(texts[0], "|", new_texts[0], sep="\n")

# %%
# The pipeline, fitted to the old texts, as one file.

constant = {"alpha": 0.0, "learning_rate": "constant", "eta0": 0.5, "shuffle": False}
pipeline = make_pipeline(TfidfVectorizer(lowercase=False), SGDClassifier("log_loss", **constant))
pipeline.fit(texts, y)
text, options = [("text", StringTensorType([None]))], {"zipmap": False}
model = to_onnx(pipeline, initial_types=text, options=options, target_opset=18)


def run(file, **inputs):
    return onnxruntime.InferenceSession(file.SerializeToString()).run(None, inputs)[0]


# %%
# The file is cut behind the features, which are computed once. The linear part trains, and its
# weights go back into the file.

features = run(og.graph.select_model_inputs_outputs(model, ["tfidftr_norm"]), text=new_texts)
linear = og.graph.select_model_inputs_outputs(model, ["score"], inputs=["tfidftr_norm"])
trainer = og.Trainer(linear, "binary_cross_entropy", optimizer="sgd", learning_rate=0.5)
trainer.fit(features, new_y, batch_size=1, shuffle=False)
adapted = og.graph.replace_initializers_into_onnx(model, trainer.state.weights)
before, after = (np.mean(run(file, text=test_texts) == test_y) for file in (model, adapted))
print(f"accuracy for new texts: {before:.2f} before, {after:.2f} after")
assert before < 0.9 < after
assert [n.op_type for n in adapted.graph.node] == [n.op_type for n in model.graph.node]

# %%
# The weights of the words, before and after, and those of ``partial_fit``.

vectorizer, classifier = (step for _, step in pipeline.steps)
old = classifier.coef_[0].copy()
classifier.partial_fit(vectorizer.transform(new_texts).toarray(), new_y)
new = trainer.state.weights["coef"][:, 0]
np.testing.assert_allclose(new, classifier.coef_[0], atol=1e-4)
np.testing.assert_array_equal(run(adapted, text=test_texts), pipeline.predict(test_texts))
order, at = np.argsort(new), np.arange(len(new))
plt.barh(at - 0.2, old[order], 0.4, label="before")
plt.barh(at + 0.2, new[order], 0.4, label="after")
plt.yticks(at, vectorizer.get_feature_names_out()[order])
plt.xlabel("weight")
plt.legend()
plt.show()
