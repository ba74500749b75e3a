"""What tests of the native form need."""

import pytest

from onnxgrad.native.blocked_layout import block_size


@pytest.fixture
def blocked_convolutions():
    """Skip a test where onnxruntime has no convolutions in blocks of channels."""
    if not block_size():
        pytest.skip("this onnxruntime has no blocked convolution here")
