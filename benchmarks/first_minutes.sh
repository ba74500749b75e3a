#!/usr/bin/env bash
# The first minutes of a new user, by what the pages say only: three jobs in an empty folder, with the
# package installed there as pip installs it. Run it with a wheel or the folder of the repository:
#     bash benchmarks/first_minutes.sh [WHEEL|FOLDER]
set -euo pipefail
package=$(realpath "${1:-$(dirname "${BASH_SOURCE[0]}")/..}")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv .venv
. .venv/bin/activate
pip install -q "${package}[images,sklearn]" pandas
PS4='
$ '

echo "== A folder of images: docs/hold/image_classifier.md, docs/image_folder.md"
pip download -q --no-deps --ignore-requires-python rapidocr-onnxruntime==1.4.4
python -m zipfile -e rapidocr_onnxruntime-1.4.4-py3-none-any.whl published
cp published/rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx classifier.onnx
python - <<'END'
import numpy as np
from pathlib import Path
from PIL import Image
from sklearn.datasets import load_digits

X, y = load_digits(return_X_y=True)
part = np.where(np.arange(len(y)) < 1200, "train", "test")
for number, (pixels, label) in enumerate(zip(X, y)):
    path = Path("digits", part[number], str(label), f"{number}.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.uint8(255 - pixels.reshape(8, 8) * 15)).resize((48, 48)).save(path)
END
digits=(--loss cross_entropy --image-size 48 --normalize 0.5/0.5)
(
    set -x
    onnxgrad train classifier.onnx digits "${digits[@]}" -o digits.onnx || true # two outputs, ten folders
    onnxgrad train classifier.onnx digits "${digits[@]}" --head 10 --lr 5e-3 --epochs 3 -o digits.onnx
    onnxgrad eval digits.onnx digits
    onnxgrad train digits.onnx digits --classes zero,one,two,three,four,five,six,seven,eight,nine \
        --epochs 1 --no-curves -o named.onnx
    onnxgrad predict named.onnx digits/test/7 -o sevens.csv
    cut -d, -f1-3 sevens.csv | head -n 4
)

echo
echo "== A pipeline of scikit-learn whose classes have names: docs/hold/scikit_learn.md"
python - <<'END'
import numpy as np
import onnx
from skl2onnx import to_onnx
from sklearn.datasets import load_wine
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

wine = load_wine(as_frame=True)
frame, names = wine.data.astype(np.float32), np.array(["barolo", "grignolino", "barbera"])
frame["wine"] = names[wine.target]
rows = np.random.default_rng(0).permutation(len(frame))
few, train, test = rows[:9], rows[:120], rows[120:]
X, y = frame.drop(columns="wine").to_numpy(), frame["wine"]
pipeline = make_pipeline(StandardScaler(), LogisticRegression(C=0.01)).fit(X[few], y[few])
onnx.save(to_onnx(pipeline, X[:1], options={"zipmap": False}), "pipeline.onnx")
frame.iloc[train].to_csv("wine.csv", index=False)
frame.iloc[test].to_csv("test.csv", index=False)
print("scikit-learn, few rows:", pipeline.score(X[test], y[test]))
END
(
    set -x
    onnxgrad eval pipeline.onnx test.csv --target wine --loss cross_entropy
    onnxgrad train pipeline.onnx wine.csv --target wine --loss cross_entropy --epochs 40 --lr 0.01 \
        --early-stopping 5 -o wine.onnx
    onnxgrad eval wine.onnx test.csv
    onnxgrad predict wine.onnx test.csv --outputs label -o wines.csv
    head -n 3 wines.csv
)
cat >names.py <<'END'
import pandas as pd

import onnxgrad as og

train, test = pd.read_csv("wine.csv"), pd.read_csv("test.csv")
trainer = og.Trainer("pipeline.onnx", "cross_entropy", learning_rate=0.01, metrics=["accuracy"])
trainer.fit(train.drop(columns="wine"), train["wine"], epochs=40)
print(trainer.evaluate(test.drop(columns="wine"), test["wine"]))
END
(set -x; python names.py)

echo
echo "== A DataFrame, a training that is broken off and resumed: docs/cli.md, the tutorial"
cat >frame.py <<'END'
import sys

import pandas as pd
from skl2onnx import to_onnx
from sklearn.datasets import load_diabetes
from sklearn.neural_network import MLPRegressor

import onnx
import onnxgrad as og

data = load_diabetes(as_frame=True).frame
X, y = data.drop(columns="target"), (data["target"] - 152) / 77
X.assign(target=y).to_parquet("diabetes.parquet")
mlp = MLPRegressor(hidden_layer_sizes=(16,), max_iter=1, random_state=0).fit(X.to_numpy("float32"), y)
onnx.save(to_onnx(mlp, X.to_numpy("float32")[:1]), "diabetes.onnx")
epochs, resume = int(sys.argv[1]), "runs/a" if len(sys.argv) > 2 else None
kept = og.Checkpoint("runs/a")
trainer = og.Trainer("diabetes.onnx", "squared_error", learning_rate=1e-2, metrics=["r2"], callbacks=[kept])
trainer.fit(X, y, validation=0.2, epochs=epochs, resume=resume)
print([(e["epoch"], round(e["validation_r2"], 3)) for e in trainer.history])
END
frame=(diabetes.onnx diabetes.parquet --target target --loss squared_error --metrics r2 --lr 1e-2)
(
    set -x
    python frame.py 2
    python frame.py 4 resume
    onnxgrad train "${frame[@]}" --epochs 2 --checkpoint runs/b -o frame.onnx --no-curves
    onnxgrad train "${frame[@]}" --epochs 4 --checkpoint runs/b --resume -o frame.onnx --no-curves --overwrite
    onnxgrad predict frame.onnx diabetes.parquet --drop-missing -o rows.csv
    head -n 3 rows.csv
)
