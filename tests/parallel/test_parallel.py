"""Several processes that train one model, against one process and against PyTorch."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnxgrad as og
from onnxgrad.graph import Emit
from onnxgrad.graph.rewrite import GROUPS, rewrite
from onnxgrad.parallel.collectives import MESSAGES, all_reduce, cut_at_exchanges
from onnxgrad.parallel.process_groups import Part
from onnxgrad.training.sharing import _leaf_texts as flat
from tests.support import parallel_worker as worker
from tests.support.commands import succeed
from tests.support.models import initializer_arrays, parse_model
from tests.support.process_pool import (
    errors_of_group,
    results_of_group,
    run_group,
    run_program,
    torchrun,
)
from tests.support.running import in_sweep

torch = pytest.importorskip("torch")
Image = pytest.importorskip("PIL.Image")


@cache
def arrays_of_one_process(job: str) -> dict[str, np.ndarray]:
    """Return what a job gives in this process."""
    return worker.training_arrays(worker.train_job(worker.job_file(job), job, False))


def assert_as_one_process(job: str, ours: dict[str, np.ndarray]) -> None:
    """Assert that the arrays of a process of a group are those of one that trains alone."""
    theirs = arrays_of_one_process(job)
    assert ours.keys() == theirs.keys()
    tolerance = 1e-12 if "double" in job else 1e-6
    for name, array in theirs.items():
        np.testing.assert_allclose(ours[name], array, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("processes", [2, in_sweep(4)])
@pytest.mark.parametrize("job", worker.JOB_NAMES)
def test_processes_train_what_one_trains(job, processes):
    files = {job: worker.job_file(job)}
    for result in results_of_group(worker.train_jobs, files, processes=processes):
        assert_as_one_process(job, result[job])


@pytest.mark.parametrize("processes", [2, in_sweep(4)])
def test_processes_of_mpi_train_what_one_trains(processes):
    files = {job: worker.job_file(job) for job in ("adam", "double_norm", "double_large_shards")}
    options = {"start": "mpirun", "processes": processes}
    for result in results_of_group(worker.train_jobs, files, **options):
        for job in files:
            assert_as_one_process(job, result[job])


def norm_gradients(parameters: dict, X, y) -> tuple[dict, torch.Tensor]:
    """Return gradients of the sum of losses of the network "norm", and its first result."""
    own = {n: p.clone().requires_grad_() for n, p in parameters.items()}
    first = torch.tensor(X).double() @ own["0.weight"].T + own["0.bias"]
    norm = own["1.weight"], own["1.bias"]
    eps = float(np.float32(1e-5))  # as attributes of ONNX are stored
    hidden = torch.nn.functional.batch_norm(first, None, None, *norm, training=True, eps=eps)
    scores = torch.tanh(hidden) @ own["3.weight"].T + own["3.bias"]
    torch.nn.functional.cross_entropy(scores, torch.tensor(y), reduction="sum").backward()
    return {n: p.grad for n, p in own.items()}, first.detach()


def test_running_statistics_of_own_rows_are_averaged():
    """Each process normalizes its rows; the means of both count as many times as they have rows."""
    rows = 25  # the last batch has 3 rows for one process, 2 for the other
    X, y = (a[:rows] for a in worker.rows_and_labels("norm", np.float64))
    file = worker.network_file("norm", np.float64)
    start = initializer_arrays(onnx.load_from_string(file))
    mean, var = (torch.tensor(start[f"1.running_{name}"]) for name in ("mean", "var"))
    network, kept = worker.torch_network("norm")[0], 0.9
    parameters = {n: p.detach().double() for n, p in network.named_parameters()}
    for start in [*range(0, rows, 10)] * 2:
        batch = range(rows)[start : start + 10]
        gradients, means, variances = [], 0.0, 0.0
        for rank in (0, 1):
            own = list(batch[Part(rank, 2).rows(len(batch))])
            found, first = norm_gradients(parameters, X[own], y[own])
            gradients.append(found)
            share = len(own) / len(batch)
            means = means + share * first.mean(0)
            variances = variances + share * first.var(0)
        mean, var = kept * mean + (1 - kept) * means, kept * var + (1 - kept) * variances
        for name, p in parameters.items():
            total = sum(found[name] for found in gradients)
            parameters[name] = p - 0.1 / len(batch) * total
    results = results_of_group(worker.train_with_own_statistics, file, rows)
    for weights, buffers, _ in results:
        expected = parameters | {"1.running_mean": mean, "1.running_var": var}
        assert (weights | buffers).keys() == expected.keys()
        for name, array in (weights | buffers).items():
            np.testing.assert_allclose(array, expected[name], rtol=1e-12, atol=1e-12, err_msg=name)
    told = [sum("sync_batch_norm" in message for message in result[2]) for result in results]
    assert told == [1, 0]


# -- what a process tells of others --------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "parts"),
    [
        (worker.fit_with_other_weights, ["ValueError", "weight 0.bias"]),
        (worker.fit_other_data, ["ValueError", "data", "shards=True"]),
        (worker.fit_ordered_rows, ["ValueError", "batch 0"]),
        (worker.fit_other_batches, ["ValueError", "shards=True"]),
        (worker.balance_own_labels, ["ValueError", "class_weight", "labels"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_differs_is_refused_by_all(function, parts):
    for error in errors_of_group(function, worker.network_file("mlp")):
        for part in parts:
            assert part in error


def test_long_arguments_are_compared_to_their_end():
    first, second = ({"a": {"b": [7] * 200 + [end]}} for end in (0, 1))
    assert flat(first) != flat(second)


def test_norms_recompute_and_dropout_work_in_several_processes():
    names = ["0.bias", "0.weight", "2.bias", "2.weight"]
    file = worker.network_file("mlp")
    assert results_of_group(worker.train_with_options_of_one_process, file) == [names, names]


@pytest.mark.parametrize(
    ("chunks", "large"),
    [("positions", False), in_sweep("positions", True), in_sweep("words", False), ("words", True)],
)
def test_processes_share_a_large_vocabulary(chunks, large):
    expected = worker.train_large_vocabulary()
    for table in results_of_group(worker.divide_large_vocabulary, chunks, large):
        np.testing.assert_allclose(table, expected, rtol=0, atol=1e-12)


def test_infinite_states_of_one_process_are_those_of_all():
    for error in errors_of_group(worker.diverge_with_shards, worker.network_file("wide")):
        assert error.startswith("ConvergenceError")


def test_requests_of_a_callback_of_one_process_are_those_of_all():
    assert results_of_group(worker.stop_by_one_process, worker.network_file("mlp")) == [5, 5]


def test_requests_within_an_epoch_are_obeyed_after_their_step(tmp_path):
    file = worker.network_file("mlp")
    X, y = worker.rows_and_labels("mlp")
    alone = worker.mlp_trainer(file, parallel=False).fit(X, y, batch_size=10).state.weights
    for steps, weight in results_of_group(worker.ask_within_epoch, file, tmp_path):
        assert steps == [3, 7, 9]
        np.testing.assert_allclose(weight, alone["0.weight"], atol=1e-6)
    assert og.callbacks.TrainState.load(tmp_path / "step-0000000006").step == 6


def test_only_the_first_process_writes(tmp_path):
    first, second = results_of_group(
        worker.write_by_callbacks, worker.network_file("mlp"), tmp_path
    )
    assert Path("history.csv") in first
    assert any(path.parts[0] == "run" for path in first)
    assert not second


@pytest.mark.parametrize("job", ["adam", "double_shards"])
def test_a_checkpoint_goes_on_with_another_number_of_processes(tmp_path, job):
    file = worker.job_file(job)
    results_of_group(worker.save_checkpoint, file, job, tmp_path / "run")
    saved = og.callbacks.TrainState.load(tmp_path / "run" / "step-0000000009")
    assert saved.slots
    assert all(saved.slots.values())
    resumed = worker.train_job(file, job, False, resume=tmp_path / "run")
    assert resumed.state.step == 27
    assert_as_one_process(job, worker.training_arrays(resumed))


def test_a_killed_process_ends_the_others_and_loses_no_checkpoint(tmp_path):
    file = worker.job_file("adam")
    outcome = run_group(worker.kill_one_process, file, tmp_path)
    assert outcome.codes == [1, -9]
    assert outcome.errors[0].startswith("ProcessLostError"), outcome.output[-3000:]
    assert og.callbacks.TrainState.load(max(tmp_path.glob("step-*"))).step == 12
    resumed = worker.train_job(file, "adam", False, resume=tmp_path)
    assert_as_one_process("adam", worker.training_arrays(resumed))


def test_processes_without_a_group_are_told(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    file, data = worker.network_file("mlp"), worker.rows_and_labels("mlp")
    with pytest.warns(UserWarning, match="init_process_group"):
        worker.mlp_trainer(file).fit(*data)
    worker.mlp_trainer(file, parallel=False).fit(*data)  # which it means
    with pytest.raises(ValueError, match="init_process_group"):
        worker.mlp_trainer(file, parallel=og.parallel.DataParallel()).fit(*data)


@pytest.mark.sweep  # the groups of `test_parallel_failures` start it by mpirun
@pytest.mark.parametrize("task", ["table", "images"])
def test_the_command_line_trains_together(tmp_path, task):
    options = "--loss cross_entropy --epochs 3 --no-curves --seed 3 --output".split()
    if task == "table":
        (tmp_path / "model.onnx").write_bytes(worker.network_file("mlp"))
        X, y = worker.rows_and_labels("mlp")
        np.savez(tmp_path / "data.npz", x=X, label=y)
        files = [tmp_path / "model.onnx", tmp_path / "data.npz"]
        options = ["--target", "label", *options]
    else:
        text = """f (float[N,3,8,8] x) => (float[N,2] z)
            { p = GlobalAveragePool(x) h = Flatten(p) z = MatMul(h, W) }"""
        onnx.save(parse_model(text, W=np.eye(3, 2, dtype=np.float32)), tmp_path / "model.onnx")
        rng = np.random.default_rng(0)
        for name in ("dark", "light"):
            (tmp_path / "photos" / name).mkdir(parents=True)
            for i in range(12):
                pixels = rng.integers(0, 100, (8, 8, 3), np.uint8) + 100 * (name == "light")
                Image.fromarray(pixels.astype(np.uint8)).save(
                    tmp_path / "photos" / name / f"{i}.png"
                )
        files = [tmp_path / "model.onnx", tmp_path / "photos"]
    command = ["-m", "onnxgrad", "train", *files, *options]
    two = run_program(torchrun(2, *command, tmp_path / "two.onnx"))
    assert two.returncode == 0, two.stderr[-3000:]
    assert "two.onnx" in two.stdout + two.stderr
    succeed("train", *files, *options, tmp_path / "one.onnx")
    ours, theirs = (initializer_arrays(onnx.load(tmp_path / f"{n}.onnx")) for n in ("two", "one"))
    for name, array in theirs.items():
        np.testing.assert_allclose(ours[name], array, rtol=0, atol=1e-6)


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
    pieces = cut_at_exchanges(_chain())
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
    assert [len(p.exchanges) for p in cut_at_exchanges(model, 100)] == [4, 0]
    pieces = cut_at_exchanges(model, 50)
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
    first, *_ = cut_at_exchanges(ir.Model(graph, ir_version=10))
    sent = {e.shape: e.ratio for e in first.exchanges}
    assert sent == {(10,): ("r", count.name), (): ()}


def test_parts_cover_a_batch():
    for rows in range(9):
        for size in range(1, 6):
            parts = [Part(rank, size) for rank in range(size)]
            own = [i for part in parts for i in range(rows)[part.rows(rows)]]
            assert own == list(range(rows))
            if rows:
                assert all(len(range(rows)[part.computed_rows(rows)]) >= 1 for part in parts)
