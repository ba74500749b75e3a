"""Write the tables of `trainable.md`: `python docs/trainable_page.py`, from the root."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from test_trainable_sklearn import ESTIMATORS, PAGE, rows_of, table

HEAD = ["| Model | Tensor | Trains | Why |", "|---|---|---|---|"]


def main() -> None:
    """Replace the table of the section on scikit-learn."""
    text, mark, _ = PAGE.read_text().partition("\n## Models of scikit-learn\n")
    lines = [line for name in ESTIMATORS for line in table(name, rows_of(name))]
    PAGE.write_text("\n".join([text + mark, *HEAD, *lines, ""]))


if __name__ == "__main__":
    main()
