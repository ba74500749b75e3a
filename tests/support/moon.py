"""A made-up execution provider, "moon", which computes on the CPU, and may have faults."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx
import onnxruntime as ort
import pytest

MOON, PLAIN = "MoonExecutionProvider", "CPUExecutionProvider"


@dataclass
class Moon:
    """The faults of the provider, and what it was asked for.

    - `fails`: operators that raise an error when they run.
    - `refuses`: operators with which a session cannot be opened.
    - `mistakes`: operators that it computes as another operator.
    - `noise`: a number that is added to an output, by the name of the output.
    - `options`: the options of each session.
    - `computed`: the operators of the last session that the provider computed.
    """

    fails: set = field(default_factory=set)
    refuses: set = field(default_factory=set)
    mistakes: dict = field(default_factory=dict)
    noise: dict = field(default_factory=dict)
    options: list = field(default_factory=list)
    computed: list = field(default_factory=list)


@pytest.fixture
def moon(monkeypatch) -> Moon:
    """Let onnxruntime have the provider "moon"; return its faults, none at first."""
    faults, real, from_numpy = Moon(), ort.InferenceSession, ort.OrtValue.ortvalue_from_numpy

    class Session(real):
        def __init__(self, model, options=None, providers=None, **more):
            names = [p if isinstance(p, str) else p[0] for p in providers or ()]
            self.on_moon, self.failing = MOON in names, None
            if self.on_moon:
                faults.options.append(dict(providers[names.index(MOON)][1]))
                proto = onnx.load_from_string(model)
                own = [n for n in proto.graph.node if not n.metadata_props]
                faults.computed = [n.op_type for n in own]
                for node in own:
                    if node.op_type in faults.refuses:
                        raise RuntimeError(f"{node.op_type} is not supported")
                    if node.op_type in faults.fails:
                        self.failing = node.op_type
                    node.op_type = faults.mistakes.get(node.op_type, node.op_type)
                model = proto.SerializeToString()
            super().__init__(model, options, providers=[PLAIN], **more)

        def raise_fault(self):
            if self.failing:
                raise RuntimeError(f"running {self.failing} node. Status Message: not on the moon")

        def run(self, *arguments):
            self.raise_fault()
            return super().run(*arguments)

        def run_with_ort_values(self, *arguments):
            self.raise_fault()
            names, *_ = arguments
            results = super().run_with_ort_values(*arguments)
            if not self.on_moon:
                return results
            added = [faults.noise.get(name, 0) for name in names]
            pairs = zip(results, added, strict=True)
            return [from_numpy(v.numpy() + np.float32(n)) if n else v for v, n in pairs]

        def get_providers(self):
            return [MOON, PLAIN] if self.on_moon else super().get_providers()

    monkeypatch.setattr(ort, "InferenceSession", Session)
    monkeypatch.setattr(ort, "get_available_providers", lambda: [MOON, PLAIN])
    return faults
