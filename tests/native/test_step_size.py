"""Steps stay as small as they are: nodes and bytes of the kernels that onnxruntime runs.

The limits are a third above what was counted with onnxruntime 1.31: another version of it does not
break them, and a form that copies more does.
"""

import pytest

pytest.importorskip("torch")
from survey import survey
from zoo import NETWORKS

from tests.support.running import in_sweep

LIMITS = {  # nodes, megabytes read and written
    "linear": (24, 0.03),
    "mlp 784-128-10": (80, 7.6),
    "lenet-5": (215, 55),
    "conv 1-d": (225, 76),
    "mlp 784-512-512-10": (150, 55),
    "gru": (2400, 165),
    "encoder 2x128": (615, 435),
    "mobilenet-v2": (1260, 760),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*list(LIMITS)[:4], *map(in_sweep, list(LIMITS)[4:])])
def test_no_step_grows(name):
    counted = survey(NETWORKS[name])
    nodes, megabytes = LIMITS[name]
    assert nodes / 3 < sum(counted.nodes.values()) < nodes
    assert megabytes / 3 < sum(counted.nbytes.values()) / 1e6 < megabytes
