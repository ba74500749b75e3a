"""Write digits_cnn.onnx: a small untrained CNN, images [N, 1, 8, 8] -> logits [N, 10]."""

from pathlib import Path

import onnx_ir as ir
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1),
    nn.ReLU(),
    nn.Conv2d(16, 32, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(512, 10),
).eval()
program = torch.onnx.export(
    model,
    (torch.zeros(2, 1, 8, 8),),
    input_names=["image"],
    output_names=["logits"],
    dynamic_shapes=({0: torch.export.Dim("N")},),
    dynamo=True,
)
# The exporter notes the paths of this machine in every node.
ir.passes.common.ClearMetadataAndDocStringPass()(program.model)
ir.save(program.model, Path(__file__).with_name("digits_cnn.onnx"))
