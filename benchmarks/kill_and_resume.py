"""Kills a training at random moments, resumes it, and compares the end with an undisturbed run.

`python benchmarks/kill_and_resume.py --kills 50` starts a training with checkpoints in a process of
its own, and kills it (SIGKILL) at a random moment: while it starts, trains, evaluates or writes.
After each kill, every visible checkpoint is loaded; then the training is resumed. A training that
has ended is compared and begun anew, until that many kills are done. `--signal TERM` and `INT` send
these instead, `--burst 3` several in a row: then the process has to save its state and exit.

Exits with 1 if a resume fails, a visible checkpoint is incomplete, or an end differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FILES = {f"{name}.safetensors" for name in ("weights", "slots", "buffers", "kept")}
FILES |= {"state.json", "files.json"}
EPOCHS, ROWS, BATCH, UNITS = 6, 640, 32, 512
EXITS = {"KILL": {-signal.SIGKILL}, "TERM": {143}, "INT": {-signal.SIGINT, 130}}


# -- the child -----------------------------------------------------------------------------------


def train(folder: Path, epochs: int, units: int) -> None:
    """Train, resume if there is something to resume, and print a digest of the end."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background of a shell
    import numpy as np
    import onnx
    from onnx import numpy_helper

    import onnxgrad as og

    class Ready(og.callbacks.Callback):
        def on_train_begin(self, trainer: Any, state: Any, control: Any) -> None:
            self.every_steps = 1
            print("ready", flush=True)

        def on_step_end(self, trainer: Any, state: Any, control: Any) -> None:
            print(f"step {state.step}", flush=True)

    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model("""
        <ir_version: 9, opset_import: ["": 20]>
        mlp (float[N, 16] x) => (float[N, 3] y) {
            a = MatMul(x, w1)  b = Add(a, b1)  h = Tanh(b)
            c = MatMul(h, w2)  d = Tanh(c)  y = MatMul(d, w3)
        }""")
    shapes = {"w1": (16, units), "b1": (units,), "w2": (units, units), "w3": (units, 3)}
    for name, shape in shapes.items():
        array = rng.normal(0, 0.1, shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    X = rng.normal(size=(ROWS + 200, 16)).astype(np.float32)
    y = (X @ rng.normal(size=(16, 3)) + rng.normal(size=(len(X), 3))).argmax(axis=1)
    trainer = og.Trainer(
        model,
        "cross_entropy",
        optimizer=og.optimizers.adamw(weight_decay=0.01),
        learning_rate=og.schedules.plateau(3e-3, patience=1),
        dropout={"h": 0.2},
        metrics=["accuracy"],
        callbacks=[
            og.EarlyStopping(patience=epochs),
            og.Checkpoint(folder, every_steps=3, monitor="validation_loss"),
            Ready(),
        ],
    )
    held_out = X[ROWS:], y[ROWS:]
    arguments = {"epochs": epochs, "batch_size": BATCH, "validation": held_out, "resume": folder}
    trainer.fit(X[:ROWS], y[:ROWS], **arguments)
    print("fitted", flush=True)
    state = trainer.state
    end = {
        "weights": _digest(state.weights),
        "slots": {name: _digest(slots) for name, slots in state.slots.items()},
        "kept": {name: _digest(arrays) for name, arrays in state.kept.items()},
        "history": state.history,
        "callbacks": state.callbacks,
        "schedule": state.schedule,
        "counts": [state.step, state.epoch, state.position, state.stop_reason],
        "model": hashlib.sha256(trainer.model.SerializeToString(deterministic=True)).hexdigest(),
    }
    print("end " + json.dumps(end), flush=True)


def _digest(arrays: dict[str, Any]) -> dict[str, str]:
    return {name: hashlib.sha256(a.tobytes()).hexdigest() for name, a in sorted(arrays.items())}


# -- the parent ----------------------------------------------------------------------------------


@dataclass
class Counts:
    """What happened."""

    kills: int = 0
    starting: int = 0  # kills before training began or went on
    writing: int = 0  # kills that left a partial checkpoint behind
    without: int = 0  # kills before the first checkpoint
    loaded: int = 0  # visible checkpoints that were read after a kill
    looks: int = 0  # at the folder, while the process was running
    trainings: int = 0  # that came to their end
    wrong: list[str] = field(default_factory=list)


class Harness:
    """Starts, kills and resumes trainings."""

    def __init__(self, epochs: int, units: int, seed: int) -> None:
        self.counts, self.random = Counts(), random.Random(seed)
        self.arguments = ["--epochs", str(epochs), "--units", str(units)]

    def start(self, folder: Path) -> subprocess.Popen:
        """Start a training that writes to `folder`."""
        command = [sys.executable, __file__, "--child", str(folder), *self.arguments]
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
        )

    def undisturbed(self, folder: Path) -> dict[str, Any]:
        """Return the end of a training that nobody disturbs."""
        process = self.start(folder)
        out, error = process.communicate()
        if process.returncode:
            raise RuntimeError(f"the undisturbed training failed:\n{error}")
        return _end(out)

    def disturbed(self, folder: Path, name: str, burst: int) -> bool:
        """Run a training for a random time, and kill it; return whether it was not finished."""
        counts, process, read = self.counts, self.start(folder), ""
        if starting := name == "KILL" and self.random.random() < 0.1:
            time.sleep(self.random.uniform(0, 1.5))
        else:
            read = self.watch(folder, process)
        for _ in range(burst):
            process.send_signal(getattr(signal, f"SIG{name}"))
            time.sleep(self.random.uniform(0, 0.01) if burst > 1 else 0)
        out, error = process.communicate()
        if "fitted" in read + out:
            return False
        counts.kills += 1
        counts.starting += starting
        counts.writing += any(folder.glob(".*.partial"))
        if process.returncode not in EXITS[name]:
            counts.wrong.append(f"exit code {process.returncode}: {error[-2000:]}")
        if name != "KILL":
            self.check_saved(folder, error)
        self.check(folder)
        return True

    def watch(self, folder: Path, process: subprocess.Popen) -> str:
        """Look at what is visible during some steps and milliseconds; return what was printed."""
        assert process.stdout is not None
        read = ""
        for _ in range(self.random.randrange(1, 20)):  # the first line says that training begins
            read += process.stdout.readline()
            self.look(folder)
        until = time.monotonic() + self.random.uniform(0, 0.1)
        while time.monotonic() < until:
            self.look(folder)
        return read

    def look(self, folder: Path) -> None:
        """Check the names of the files of visible checkpoints."""
        for path in visible(folder):
            try:
                folder_id = path.stat().st_ino
                names = set(os.listdir(path))
                if path.stat().st_ino != folder_id:
                    continue  # replaced meanwhile
            except FileNotFoundError:
                continue  # removed meanwhile, as a newer one is there
            self.counts.looks += 1
            if names != FILES:
                self.counts.wrong.append(f"{path.name} had {sorted(names)}")

    def check(self, folder: Path) -> None:
        """Load every visible checkpoint."""
        from onnxgrad.callbacks import TrainState

        paths = visible(folder)
        self.counts.without += not paths
        for path in paths:
            try:
                assert path.name.startswith("step-"), path
                state = TrainState.load(path)
                assert state.step == int(path.name.removeprefix("step-")), state.step
                assert state.weights.keys() == state.slots.keys() != set()
                self.counts.loaded += 1
            except Exception as e:
                self.counts.wrong.append(f"{path.name} is incomplete: {e!r}")

    def check_saved(self, folder: Path, error: str) -> None:
        """Check that a process that was asked to end has saved its state, and left nothing."""
        from onnxgrad.callbacks import TrainState

        wrong, paths = self.counts.wrong, visible(folder)
        if paths and TrainState.load(paths[-1]).stop_reason != "interrupted":
            wrong.append(f"the state of the interruption is not saved: {error[-2000:]}")
        if left := [p.name for p in folder.glob(".*")]:
            wrong.append(f"left behind: {left}")

    def run(self, kills: int, name: str, burst: int, report: bool = False) -> Counts:
        """Disturb trainings until there were so many kills, and let the last one end."""
        counts = self.counts
        with tempfile.TemporaryDirectory() as root:
            expected = self.undisturbed(Path(root, "undisturbed"))
            while counts.kills < kills and not counts.wrong:
                folder = Path(root, str(counts.trainings))
                while counts.kills < kills and self.disturbed(folder, name, burst):
                    if report:
                        print(f"{counts.kills}: {_steps(folder)}", flush=True)
                end = self.undisturbed(folder)  # resumed, or a finished one that is resumed
                counts.trainings += 1
                if end != expected:
                    keys = [key for key in expected if end[key] != expected[key]]
                    counts.wrong.append(f"the end differs in {keys}: {end} {expected}")
        return counts


def visible(folder: Path) -> list[Path]:
    """Return what is visible in a folder: files that are hidden belong to the writer."""
    if not folder.exists():
        return []
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def _steps(folder: Path) -> str:
    hidden = sorted(path.suffix for path in folder.glob(".*"))
    return " ".join([path.name for path in visible(folder)] + hidden) or "no checkpoint"


def _end(out: str) -> dict[str, Any]:
    return json.loads(out.splitlines()[-1].removeprefix("end "))


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--signal", choices=EXITS, default="KILL")
    parser.add_argument("--burst", type=int, default=1, help="signals in a row")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--units", type=int, default=UNITS, help="1 MB of weights are 512")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        train(given.child, given.epochs, given.units)
        return
    start = time.monotonic()
    harness = Harness(given.epochs, given.units, given.seed)
    counts = harness.run(given.kills, given.signal, given.burst, report=True)
    for name, value in vars(counts).items():
        print(f"{name}: {value}")
    print(f"seconds: {time.monotonic() - start:.0f}")
    sys.exit(bool(counts.wrong))


if __name__ == "__main__":
    main()
