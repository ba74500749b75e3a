"""Several processes that train one model, against one process and against PyTorch."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

import onnxgrad as og
from onnxgrad import Emit
from onnxgrad.graph.rewrite import GROUPS, rewrite
from onnxgrad.parallel import MESSAGES, Part, all_reduce, cut
from onnxgrad.training.sharing import _flat as flat
from tests.support.paths import ROOT
from tests.support.running import PATIENCE

torch = pytest.importorskip("torch")
from tests.support import parallel_worker as worker  # noqa: E402  # which imports torch

WORKER = Path(worker.__file__)
EQUAL = [job for job in worker.JOBS if job != "local"]


def torchrun(processes: int, *arguments: object) -> list[str]:
    own = ["--standalone", f"--nproc-per-node={processes}"]
    return [sys.executable, "-m", "torch.distributed.run", *own, *map(str, arguments)]


def launched(command: list[str], **more: object) -> subprocess.CompletedProcess:
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, **more)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def mpirun(processes: int, *arguments: object) -> list[str]:
    if shutil.which("mpirun") is None or find_spec("mpi4py") is None:
        pytest.skip("needs mpirun and mpi4py")
    as_root = ["--allow-run-as-root", "--oversubscribe", "-n", str(processes)]
    return ["mpirun", *as_root, sys.executable, *map(str, arguments)]


@pytest.fixture(
    scope="module",
    params=[
        ("torch", 2),
        ("mpi", 2),
        pytest.param(("torch", 4), marks=pytest.mark.sweep),
        pytest.param(("mpi", 4), marks=pytest.mark.sweep),
    ],
    ids=str,
)
def together(request, tmp_path_factory) -> tuple[int, Path]:
    """Return how many processes have trained, and the folder of what came out."""
    engine, processes = request.param
    folder = tmp_path_factory.mktemp("parallel")
    start = {"torch": torchrun, "mpi": mpirun}[engine]
    launched(start(processes, WORKER, engine, folder, *worker.JOBS))
    return processes, folder


@pytest.fixture(scope="module")
def alone():
    """Return the results of a job in this process, computed once."""
    known: dict[str, dict[str, np.ndarray]] = {}

    def of(job: str) -> dict[str, np.ndarray]:
        if job not in known:
            known[job] = worker.results(worker.trained(job, parallel=False))
        return known[job]

    return of


@pytest.mark.parametrize("job", EQUAL)
def test_processes_train_what_one_trains(together, alone, job):
    _, folder = together
    ours, theirs = dict(np.load(folder / f"{job}.npz")), alone(job)
    assert ours.keys() == theirs.keys()
    tolerance = 1e-12 if "double" in job else 1e-6
    for name, array in theirs.items():
        np.testing.assert_allclose(ours[name], array, rtol=tolerance, atol=tolerance, err_msg=name)


def test_local_steps_are_those_of_pytorch_averaged(together):
    processes, folder = together
    network, _, options, _ = worker.JOBS["local"]
    _, shape = worker.exported(network)
    X, y = map(torch.from_numpy, worker.data(shape))
    modules = [worker._network(network)[0] for _ in range(processes)]
    every = options["local_steps"]

    def average() -> None:
        with torch.no_grad():
            for same in zip(*(m.parameters() for m in modules), strict=True):
                mean = torch.stack(list(same)).mean(0)
                for p in same:
                    p.copy_(mean)

    step = 0
    for epoch in range(12):
        order = np.random.default_rng([0, epoch]).permutation(worker.ROWS)
        for start in range(0, worker.ROWS, 10):
            batch = order[start : start + 10]
            for rank, module in enumerate(modules):
                own = batch[Part(rank, processes).rows(len(batch))]
                if len(own):
                    module.zero_grad()
                    torch.nn.functional.cross_entropy(module(X[own]), y[own]).backward()
                    with torch.no_grad():
                        for p in module.parameters():
                            p -= 0.01 * p.grad
            step += 1
            if step % every == 0:
                average()
        average()
    ours = np.load(folder / "local.npz")
    for name, p in modules[0].named_parameters():
        np.testing.assert_allclose(ours[name], p.detach(), rtol=0, atol=1e-6)


# -- what a process tells of others --------------------------------------------------------------

SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
import numpy as np, torch
import onnxgrad as og
from tests.support import parallel_worker as worker
torch.distributed.init_process_group("gloo")
rank, size = worker.rank_and_size()
model, shape = worker.exported("mlp")
X, y = worker.data(shape)
try:
{body}
except Exception as e:
    worker.tell(f"RAISED {{rank}} {{type(e).__name__}} {{e}}")
torch.distributed.destroy_process_group()
"""


def said(body: str, processes: int = 2, code: int | None = 0) -> str:
    """Return what a program prints that runs in several processes."""
    lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
    path = Path(os.environ["PYTEST_SCRIPTS"]) / f"script{abs(hash(body))}.py"
    path.write_text(SCRIPT.format(tests=str(ROOT), body=lines))
    done = subprocess.run(
        torchrun(processes, path), capture_output=True, text=True, timeout=PATIENCE
    )
    assert code is None or done.returncode == code, done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.fixture(autouse=True)
def scripts(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTEST_SCRIPTS", str(tmp_path))


def test_other_weights_are_refused_by_all():
    text = said("""
trainer = og.Trainer(model, "cross_entropy")
trainer.state.weights = {"0.bias": np.full(16, rank, np.float32)}
trainer.fit(X, y)
""")
    assert text.count("RAISED") == 2
    assert "weight 0.bias" in text


def test_other_data_are_refused_by_all():
    text = said("""
og.Trainer(model, "cross_entropy").fit(X + rank, y)
""")
    assert text.count("RAISED") == 2
    assert "data" in text
    assert "shards=True" in text


def test_rows_in_another_order_are_refused_by_all():
    text = said("""
class Stream:  # whose rows no description tells
    def __iter__(self):
        order = np.arange(8)[:: 1 - 2 * rank]
        return iter([(X[order], y[order])] * 3)
og.Trainer(model, "cross_entropy").fit(Stream())
""")
    assert text.count("batch 0 is not the same in all processes") == 2


def test_long_arguments_are_compared_to_their_end():
    first, second = ({"a": {"b": [7] * 200 + [end]}} for end in (0, 1))
    assert flat(first) != flat(second)


def test_other_batches_are_refused_by_all():
    text = said("""
og.Trainer(model, "cross_entropy").fit([(X[rank * 8:][:8], y[:8])] * 3)
""")
    assert text.count("RAISED") == 2
    assert "shards=True" in text


def test_class_weights_of_some_of_the_labels_are_refused():
    text = said("""
how = og.DataParallel(shards=True)
og.Trainer(model, "cross_entropy", class_weight="balanced", parallel=how).fit(X, y)
""")
    assert text.count("pass the weights of the classes") == 2


def test_norms_recompute_and_dropout_work_in_several_processes():
    text = said("""
norms = og.Norms(every_steps=1)
options = {"dropout": {"*Tanh*": 0.2}, "callbacks": [norms], "recompute": "all"}
trainer = og.Trainer(model, "cross_entropy", **options).fit(X, y, batch_size=10)
worker.tell(f"NORMS {sorted(trainer.gradient_norms)}")
""")
    assert text.count("NORMS ['0.bias', '0.weight', '2.bias', '2.weight']") == 2


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("chunks", ["positions", "words"])
def test_processes_share_a_large_vocabulary(chunks, large):
    body = f"""
from tests.support import causal_lm_cases as lm
patch = type("", (), {{"setattr": staticmethod(setattr)}})
lm.divide_logits(patch, {chunks!r})
{"setattr(worker.without_elements, 'LARGE', 0)" if large else ""}
options = {{"optimizer": "sgd", "learning_rate": 0.5, "train": "*"}}
trainer = og.Trainer(lm.causal_model("tied"), "causal_lm", **options)
trainer.fit(lm.IDS, lm.LABELS, epochs=2, batch_size=4, shuffle=False)
table, start = trainer.state.weights["table"], lm.TABLE
worker.tell(f"SUM {{float(np.abs(table - start).sum()):.9f}} {{float((table * start).sum()):.9f}}")
"""
    from tests.support import causal_lm_cases as lm

    options = {"optimizer": "sgd", "learning_rate": 0.5, "train": "*"}
    trainer = og.Trainer(lm.causal_model("tied"), "causal_lm", **options)
    trainer.fit(lm.IDS, lm.LABELS, epochs=2, batch_size=4, shuffle=False)
    table, start = trainer.state.weights["table"], lm.TABLE
    moved, product = np.abs(table - start).sum(), (table * start).sum()
    assert said(body).count(f"SUM {moved:.9f} {product:.9f}") == 2


def test_infinite_states_of_one_process_are_those_of_all():
    text = said("""
how = og.DataParallel(shard_optimizer=True)
model, shape = worker.exported("wide")
X, y = worker.data(shape)
options = {"optimizer": "adam", "learning_rate": 1e38, "parallel": how}
og.Trainer(model, "cross_entropy", **options).fit(X, y, batch_size=10)
""")
    assert text.count("ConvergenceError") == 2


def test_a_loss_that_compares_rows_is_told():
    text = said("""
model, shape = worker.exported("norm")
og.Trainer(model, "cross_entropy", batch_norm="train").fit(X[:80], y[:80], batch_size=16)
""")
    assert text.count("sync_batch_norm") == 1  # by the first process


def test_requests_of_a_callback_of_one_process_are_those_of_all():
    text = said("""
class Stop(og.Callback):
    def on_step_end(self, trainer, state, control):
        control.stop = rank == 1 and state.step >= 5
trainer = og.Trainer(model, "cross_entropy", callbacks=[Stop()])
trainer.fit(X, y, batch_size=4, epochs=3)
worker.tell(f"STEPS {trainer.state.step}")
""")
    assert text.count("STEPS 5") == 2


def test_requests_within_an_epoch_are_obeyed_after_their_step(tmp_path):
    text = said(f"""
class Ask(og.Callback):
    def on_step_end(self, trainer, state, control):
        control.evaluate = rank == 1 and state.step in (3, 7)
        control.save = rank == 0 and state.step == 6
trainer = og.Trainer(model, "cross_entropy", callbacks=[Ask(), og.Checkpoint({str(tmp_path)!r})])
trainer.fit(X, y, batch_size=10, validation=(X[:31], y[:31]))
worker.tell(f"ENTRIES {{[entry['step'] for entry in trainer.history]}}")
alone = og.Trainer(model, "cross_entropy", parallel=False).fit(X, y, batch_size=10)
ours, theirs = (t.state.weights["0.weight"] for t in (trainer, alone))
worker.tell(f"EQUAL {{np.allclose(ours, theirs, atol=1e-6)}}")
""")
    assert text.count("ENTRIES [3, 7, 9]") == 2
    assert text.count("EQUAL True") == 2
    assert og.TrainState.load(tmp_path / "step-0000000006").step == 6


def test_only_the_first_process_writes(tmp_path):
    text = said(f"""
history = og.History({str(tmp_path / "history.csv")!r})
checkpoint = og.Checkpoint({str(tmp_path / "run")!r}, every_steps=2)
trainer = og.Trainer(model, "cross_entropy", callbacks=[history, checkpoint])
trainer.fit(X, y, batch_size=20)
worker.tell("WROTE " + str(hasattr(checkpoint, "_began")))
""")
    assert "WROTE True" in text
    assert "WROTE False" in text
    assert (tmp_path / "history.csv").exists()


@pytest.mark.parametrize("job", ["adam", "double_shards"])
def test_a_checkpoint_goes_on_with_another_number_of_processes(tmp_path, job):
    said(f"""
class Reads(og.Callback):  # which must not make a checkpoint of what it has read
    def on_step_end(self, trainer, state, control):
        assert state.slots is not None
checkpoint = og.Checkpoint({str(tmp_path / "run")!r}, every_steps=9)
worker.trained({job!r}, True, callbacks=[Reads(), checkpoint], epochs=2)
""")
    saved = og.TrainState.load(tmp_path / "run" / "step-0000000009")
    assert saved.slots
    assert all(saved.slots.values())
    resumed = worker.trained(job, False, epochs=4, resume=tmp_path / "run")
    whole = worker.trained(job, False, epochs=4)
    assert resumed.state.step == whole.state.step == 36
    for name, array in worker.results(whole).items():
        np.testing.assert_allclose(worker.results(resumed)[name], array, rtol=1e-6, atol=1e-6)


def test_a_killed_process_ends_the_others_and_loses_no_checkpoint(tmp_path):
    run, script = tmp_path / "run", tmp_path / "train.py"
    script.write_text(
        SCRIPT.format(
            tests=str(ROOT),
            body=f"""
    import os, time
    class Slow(og.Callback):
        def on_step_end(self, trainer, state, control):
            time.sleep(0.05)
            if state.step == 12:
                with open({str(tmp_path)!r} + f"/pid{{rank}}", "w") as file:
                    file.write(str(os.getpid()))
    worker.trained("adam", True, [Slow(), og.Checkpoint({str(run)!r}, every_steps=4)], epochs=100)
""",
        )
    )
    # without a launcher, which would end the other process before it can tell anything
    port = str(free_port())
    both = [
        subprocess.Popen(
            [sys.executable, script],
            env=os.environ
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in "01"
    ]
    wait_for(tmp_path / "pid1")
    both[1].kill()
    output, _ = both[0].communicate(timeout=PATIENCE)
    both[1].communicate(timeout=PATIENCE)
    assert "RAISED 0 ProcessLostError" in output, output[-3000:]
    state = og.TrainState.load(max(run.glob("step-*")))
    assert state.step >= 12
    resumed = worker.trained("adam", False, epochs=8, resume=run)
    whole = worker.trained("adam", False, epochs=8)
    for name, array in worker.results(whole).items():
        np.testing.assert_allclose(worker.results(resumed)[name], array, rtol=1e-6, atol=1e-6)


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return opened.getsockname()[1]


def wait_for(path: Path) -> None:
    for _ in range(10 * PATIENCE):
        if path.exists() and path.read_text():
            return
        time.sleep(0.1)
    raise AssertionError(f"{path} is not there")


def test_processes_without_a_group_are_told(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    model, shape = worker.exported("mlp")
    X, y = worker.data(shape)
    with pytest.warns(UserWarning, match="each trains a model of its own"):
        og.Trainer(model, "cross_entropy").fit(X, y)
    og.Trainer(model, "cross_entropy", parallel=False).fit(X, y)  # which it means
    with pytest.raises(ValueError, match="init_process_group"):
        og.Trainer(model, "cross_entropy", parallel=og.DataParallel()).fit(X, y)


def test_the_command_line_trains_together(tmp_path):
    model, shape = worker.exported("mlp")
    X, y = worker.data(shape)
    (tmp_path / "model.onnx").write_bytes(model)
    np.savez(tmp_path / "data.npz", x=X, label=y)
    files = [tmp_path / "model.onnx", tmp_path / "data.npz"]
    options = [
        "--loss",
        "cross_entropy",
        "--target",
        "label",
        "--epochs",
        "3",
        "--no-curves",
        "--seed",
        "3",
    ]
    command = ["-m", "onnxgrad", "train", *map(str, files), *options, "--output"]
    done = launched(torchrun(2, *command, tmp_path / "two.onnx"))
    assert done.stdout.count("two.onnx") + done.stderr.count("two.onnx") >= 1
    launched([sys.executable, *command, str(tmp_path / "one.onnx")])
    ours, theirs = (_weights(tmp_path / f"{n}.onnx") for n in ("two", "one"))
    for name, array in theirs.items():
        np.testing.assert_allclose(ours[name], array, rtol=0, atol=1e-6)


def _weights(path: Path) -> dict[str, np.ndarray]:
    return {name: t.const_value.numpy() for name, t in ir.load(path).graph.initializers.items()}


# -- pieces --------------------------------------------------------------------------------------


def _chain() -> ir.Model:
    """Return y = b sum(a x), z = y + sum(y x), where `sum` is over processes."""
    values = [
        ir.Value(name=n, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([2])) for n in "abx"
    ]
    a, b, x = values
    graph = ir.Graph(values, [], nodes=[], opset_imports={"": 20}, name="chain")
    op = Emit(graph)
    with op:
        y = b * all_reduce(op, a * x)
        z = y + all_reduce(op, y * x)
    op.give([z])
    return ir.Model(graph, ir_version=10)


def test_a_graph_is_cut_at_its_exchanges():
    pieces = cut(_chain())
    assert [len(p.exchanges) for p in pieces] == [1, 1, 0]
    assert [n.op_type for n in pieces[0].model.graph.node] == ["Mul"]
    read = [{x.name for x in p.model.graph.input} for p in pieces]
    assert read[0] == {"a", "x"}
    assert pieces[0].exchanges[0].received in read[1]


def test_half_of_a_large_message_is_sent_earlier():
    """The half that is computed first, with the count by which it is divided."""
    kinds = {"type": ir.TensorType(ir.DataType.FLOAT)}
    x = ir.Value(name="x", shape=ir.Shape([2, 3]), **kinds)
    r, n = (ir.Value(name=name, shape=ir.Shape([]), **kinds) for name in "rn")
    graph = ir.Graph([x, r, n], [], nodes=[], opset_imports={"": 20}, name="backward")
    op = Emit(graph)
    with op:
        own = op.Abs(n)
        last = op.Neg(x)
        middle = op.Exp(last)
        first = op.Sin(middle)
        count = all_reduce(op, own)
        sums = [all_reduce(op, v, (r, own)) for v in (first, middle, last)]
        y = op.Concat(*sums, axis=0)
    op.give([y, count])
    y.shape = ir.Shape([6, 3])
    model = ir.Model(graph, ir_version=10)
    assert [len(p.exchanges) for p in cut(model, 100)] == [4, 0]
    pieces = cut(model, 50)
    operators = [[node.op_type for node in p.model.graph.node] for p in pieces]
    assert operators == [["Abs", "Neg"], ["Exp", "Sin"], ["Concat"]]
    assert [len(p.exchanges) for p in pieces] == [2, 2, 0]


def test_sums_of_parts_of_a_vector_are_one_message():
    kinds = {"type": ir.TensorType(ir.DataType.FLOAT)}
    a, b = (ir.Value(name=n, shape=ir.Shape([2, k]), **kinds) for n, k in (("a", 3), ("b", 2)))
    r, n = (ir.Value(name=name, shape=ir.Shape([]), **kinds) for name in "rn")
    graph = ir.Graph([a, b, r, n], [], nodes=[], opset_imports={"": 20}, name="small")
    op = Emit(graph)
    with op:
        count = all_reduce(op, op.Abs(n))
        ratio = r, count.producer().inputs[0]
        parts = [op.Reshape(all_reduce(op, op.Neg(x), ratio), [-1]) for x in (a, b)]
        y = op.Concat(*parts, axis=0)
    op.give([y, count])
    y.shape = ir.Shape([10])
    rewrite(graph, GROUPS[MESSAGES])
    first, *_ = cut(ir.Model(graph, ir_version=10))
    sent = {e.shape: e.ratio for e in first.exchanges}
    assert sent == {(10,): ("r", count.name), (): ()}


def test_parts_cover_a_batch():
    for rows in range(9):
        for size in range(1, 6):
            parts = [Part(rank, size) for rank in range(size)]
            own = [i for part in parts for i in range(rows)[part.rows(rows)]]
            assert own == list(range(rows))
            if rows:
                assert all(len(range(rows)[part.fed(rows)]) >= 1 for part in parts)
