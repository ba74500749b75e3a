"""Every form of the gradient of a convolution's weight, whichever is the fastest."""

from __future__ import annotations

import pytest

from onnxgrad import check_gradient, onnx_derivative
from onnxgrad.autodiff.forms import convolutions
from tests.support.convolution_cases import (
    CHECK,
    Convolution,
    conv_model,
    convolution_feed,
    convolution_parts,
    sweep_of,
)
from tests.support.models import operator_names
from tests.support.packs import failures

UNIT_STRIDE = [
    Convolution("1-D", "Conv<dilations=[2], pads=[1,2]>(x, w)", ((2, 3, 9), (4, 3, 3))),
    Convolution("2-D", "Conv<dilations=[2,1], pads=[2,0,1,1]>(x, w)", ((2, 3, 6, 5), (4, 3, 3, 2))),
    Convolution("groups", "Conv<group=2, pads=[1,1,1,1]>(x, w)", ((2, 4, 4, 5), (6, 2, 3, 3))),
    Convolution("3-D", "Conv<pads=[1,0,0,0,1,0]>(x, w)", ((2, 2, 3, 4, 4), (3, 2, 2, 1, 3))),
    Convolution("1x1", "Conv<pads=[0,1,2,0]>(x, w)", ((2, 3, 4, 5), (4, 3, 1, 1))),
    Convolution("1x1, strides", "Conv<strides=[2,3], group=2>(x, w)", ((2, 4, 6, 5), (4, 2, 1, 1))),
    Convolution(
        "a channel a group", "Conv<group=3, dilations=[1,2]>(x, w)", ((2, 3, 6, 7), (6, 1, 3, 2))
    ),
    Convolution("transposed", "ConvTranspose<group=2>(x, w)", ((2, 4, 3, 4), (4, 3, 3, 2))),
]


FORMS = ["multiply_shifted_g", "multiply_shifted_x", "multiply_columns"]


@pytest.mark.parametrize("form", FORMS)
def test_gradient_of_the_weight_in_every_form(form, monkeypatch):
    only = {getattr(convolutions, form): 1.0}
    monkeypatch.setattr(convolutions, "estimated_times", lambda *_: only)
    assert failures(convolution_parts(UNIT_STRIDE, "rows"), CHECK) == []


@pytest.mark.parametrize("form", FORMS)
@sweep_of(UNIT_STRIDE)
def test_second_order_of_the_weight_in_every_form(case, form, monkeypatch):
    only = {getattr(convolutions, form): 1.0}
    monkeypatch.setattr(convolutions, "estimated_times", lambda *_: only)
    report = check_gradient(conv_model(case, "rows"), feed=convolution_feed(case), order=2)
    assert report.ok, str(report)


STRIDED = [
    Convolution("2-D", "Conv<strides=[2,2], pads=[1,1,1,1]>(x, w)", ((2, 3, 6, 7), (4, 3, 3, 3))),
    Convolution("rest", "Conv<strides=[3,3], pads=[2,0,1,1]>(x, w)", ((2, 3, 9, 7), (4, 3, 4, 2))),
    Convolution("patches", "Conv<strides=[2,2]>(x, w)", ((2, 3, 5, 6), (4, 3, 2, 2))),
    Convolution("1-D", "Conv<strides=[3], pads=[2,1]>(x, w)", ((2, 2, 11), (3, 2, 5))),
    Convolution(
        "a channel a group", "Conv<strides=[2,2], group=3>(x, w)", ((2, 3, 8, 7), (3, 1, 3, 3))
    ),
    Convolution("transposed", "ConvTranspose<strides=[2,2]>(x, w)", ((2, 3, 3, 4), (3, 2, 3, 2))),
]


def test_gradient_of_the_weight_with_strides_as_channels(monkeypatch):
    monkeypatch.setattr(convolutions, "is_split_faster", lambda *_: True)
    for case in STRIDED:
        kinds = operator_names(onnx_derivative(conv_model(case, "rows")))
        assert ("SpaceToDepth" in kinds) == (case.id != "1-D"), case.id
    assert failures(convolution_parts(STRIDED, "rows"), CHECK) == []


@sweep_of(STRIDED)
def test_second_order_with_strides_as_channels(case, monkeypatch):
    monkeypatch.setattr(convolutions, "is_split_faster", lambda *_: True)
    report = check_gradient(conv_model(case, "rows"), feed=convolution_feed(case), order=2)
    assert report.ok, str(report)
