"""Checks of arguments."""

import numpy as np
import pytest

from onnxgrad.checks import check_choice, check_count, check_fraction, check_number, check_positive
from tests.support.errors import naming


def test_values_are_returned_as_numbers_of_python():
    for check, value in (
        (check_count, np.int32(3)),
        (check_number, np.float32(0.5)),
        (check_number, 0),
        (check_positive, np.int64(2)),
        (check_fraction, 1),
    ):
        checked = check("size", value)
        assert checked == value
        assert type(checked) is (int if check is check_count else float)
    assert check_count("size", 0, least=0) == 0
    assert check_number("size", np.inf, infinite=True) == np.inf
    assert check_choice("mode", "min", ("min", "max")) == "min"


@pytest.mark.parametrize(
    ("check", "wrong"),
    [
        (check_count, [0, -1, 2.0, True, np.True_, "3", None]),
        (check_number, [-0.1, np.nan, np.inf, True, np.True_, "3", None]),
        (check_positive, [0, 0.0, -1, np.nan, -np.inf]),
        (check_fraction, [-0.1, 1.1, np.nan, False]),
    ],
)
def test_wrong_values_are_named(check, wrong):
    for value in wrong:
        with pytest.raises(ValueError, match=naming("size", repr(value))):
            check("size", value)


def test_wrong_choices_and_bounds_are_named():
    with pytest.raises(ValueError, match=naming("mode", "'mix'", "'min'")):
        check_choice("mode", "mix", ("min", "max"))
    with pytest.raises(ValueError, match=naming("size", "2", "1")):
        check_count("size", 1, least=2)
    with pytest.raises(ValueError, match=naming("size", "nan")):
        check_number("size", np.nan, infinite=True)
