"""Groups of processes that run a function of `tests.support`: by fork, torchrun or mpirun.

Starting Python with PyTorch takes longer than what most tests of groups do. So one process imports
all that they need, and forks the processes of each group when a test asks for them: a group starts
in a moment, with the state that the imports have left, whatever the groups before it did.

    python -m tests.support.process_pool fork                   forks the groups that stdin names
    python -m tests.support.process_pool torch|mpi FOLDER       is one process of a group
"""

from __future__ import annotations

import atexit
import gc
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.paths import ROOT
from tests.support.running import PATIENCE

IMPORTS = ("torch.distributed", "onnxgrad", "onnxgrad.training.trainer", "mpi4py")
IMPORTS += ("tests.support.parallel_worker", "tests.support.parallel_failing")
REQUEST, OUTPUT, CODES = "request", "output", "codes"  # files in the folder of a group


class GroupOutcome(NamedTuple):
    """What a group leaves: exit codes, results and errors by rank, and all that it has printed.

    By a launcher, there is one exit code. An error is its type and its message, separated by ": ".
    """

    codes: list[int]
    results: list[Any]
    errors: list[str]
    output: str


def run_group(
    function: Callable[..., Any], *arguments: Any, start: str = "fork", processes: int = 2
) -> GroupOutcome:
    """Call a function of `tests.support` in each process of a new group, and wait for their end.

    `start`: "fork", of a group of torch.distributed; "torchrun" and "mpirun": as users start them.
    A group that does not end is killed, and fails the test.
    """
    folder = Path(tempfile.mkdtemp(prefix="group-"))
    try:
        (folder / REQUEST).write_bytes(pickle.dumps((function, arguments, _coverage_options())))
        if start == "fork":
            codes = _fork_group(folder, processes)
        else:
            launch = {"torchrun": torchrun, "mpirun": mpirun}[start]
            engine = "mpi" if start == "mpirun" else "torch"
            done = run_program(launch(processes, "-m", __name__, engine, folder))
            codes = [done.returncode]
            (folder / OUTPUT).write_text(done.stdout + done.stderr)
        results, errors = [], []
        for rank in range(processes):
            path = folder / f"result-{rank}"
            result, error = pickle.loads(path.read_bytes()) if path.exists() else (None, "")
            results.append(result)
            errors.append(error)
        return GroupOutcome(codes, results, errors, (folder / OUTPUT).read_text())
    finally:
        shutil.rmtree(folder)


def results_of_group(function: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
    """Return what a function returns in each process of a group, none of which may fail."""
    outcome = run_group(function, *arguments, **options)
    assert not any(outcome.codes + outcome.errors), outcome.output[-3000:]
    return outcome.results


def errors_of_group(function: Callable[..., Any], *arguments: Any, **options: Any) -> list[str]:
    """Return the errors that a function raises in each process of a group."""
    outcome = run_group(function, *arguments, **options)
    assert all(outcome.errors), outcome.output[-3000:]
    return outcome.errors


def run_program(command: list[object], **options: Any) -> subprocess.CompletedProcess:
    """Run a command in the folder of the repository, and return its exit code and output."""
    words = list(map(str, command))
    options = {"cwd": ROOT, "timeout": PATIENCE} | options
    return subprocess.run(words, capture_output=True, text=True, **options)


def torchrun(processes: int, *arguments: object) -> list[object]:
    """Return the command that starts processes of Python by torchrun."""
    own = ["--standalone", f"--nproc-per-node={processes}"]
    return [sys.executable, "-m", "torch.distributed.run", *own, *arguments]


def mpirun(processes: int, *arguments: object) -> list[object]:
    """Return the command that starts processes of Python by mpirun; skip where there is none."""
    if shutil.which("mpirun") is None or find_spec("mpi4py") is None:
        pytest.skip("needs mpirun and mpi4py")
    as_root = ["--allow-run-as-root", "--oversubscribe", "-n", processes]
    return ["mpirun", *as_root, sys.executable, *arguments]


def _coverage_options() -> dict[str, Any] | None:
    """Return how the lines that processes of a group run are recorded, of the test that asks."""
    module = sys.modules.get("coverage")
    current = module.Coverage.current() if module else None
    if current is None:
        return None
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
    settings = current.config
    source = [*(settings.source or ()), *(settings.source_pkgs or ())]
    return {"data_file": settings.data_file, "source": source, "context": f"{test}|run"}


# -- the process that forks groups ---------------------------------------------------------------


def _fork_group(folder: Path, processes: int) -> list[int]:
    """Let the forking process start a group; return the exit codes."""
    if _server().poll() is not None:  # something has killed it
        _server.cache_clear()
    server = _server()
    server.stdin.write(f"{processes} {folder}\n")
    server.stdin.flush()
    if server.stdout.readline().strip() != str(folder):
        _server.cache_clear()  # the next test starts another one
        raise AssertionError(f"the process that forks groups has ended: {server.wait()}")
    text = (folder / CODES).read_text()
    if not text:
        raise AssertionError(f"the group did not end: {(folder / OUTPUT).read_text()[-3000:]}")
    return [int(code) for code in text.split()]


@cache
def _server() -> subprocess.Popen:
    """Start the process that forks groups, at the first group of this process."""
    own = {"COVERAGE_PROCESS_CONFIG", "COVERAGE_PROCESS_START"}  # groups record their own lines
    environment = {name: value for name, value in os.environ.items() if name not in own}
    server = subprocess.Popen(
        [sys.executable, "-m", __name__, "fork"],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(server.stdin.close)  # at which it ends
    return server


def _serve() -> tuple[Path, str] | None:
    """Fork the groups that stdin names; in a forked process, return its folder and its engine."""
    for name in IMPORTS:
        if find_spec(name.split(".")[0]):
            import_module(name)
    gc.freeze()  # collections in forked processes would copy the memory of what was imported
    for line in sys.stdin:
        count, name = line.rstrip("\n").split(" ", 1)
        folder, port = Path(name), _free_port()
        children: dict[int, int] = {}  # ranks by process
        (folder / OUTPUT).touch()
        for rank in range(int(count)):
            if not (process := os.fork()):
                _become_member(folder, rank, int(count), port)
                return folder, "torch"
            children[process] = rank
        codes = _wait_for(children)
        text = " ".join(str(codes[rank]) for rank in sorted(codes)) if codes else ""
        (folder / CODES).write_text(text)
        print(folder, flush=True)
    return None


def _become_member(folder: Path, rank: int, count: int, port: int) -> None:
    """Give a forked process the environment of torchrun, and files in place of its streams."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    output = os.open(folder / OUTPUT, os.O_WRONLY | os.O_APPEND)
    for descriptor, stream in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1), (output, 2)):
        os.dup2(descriptor, stream)


def _wait_for(children: dict[int, int]) -> dict[int, int]:
    """Return the exit codes of processes by rank; kill all and return nothing if they hang."""
    codes: dict[int, int] = {}
    until = time.monotonic() + PATIENCE
    while len(codes) < len(children):
        process, status = os.waitpid(-1, os.WNOHANG)
        if process:
            codes[children[process]] = os.waitstatus_to_exitcode(status)
        elif time.monotonic() > until:
            for other in children.keys() - {p for p, r in children.items() if r in codes}:
                os.kill(other, signal.SIGKILL)
                os.waitpid(other, 0)
            return {}
        else:
            time.sleep(0.005)
    return codes


def _free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return opened.getsockname()[1]


# -- a process of a group ------------------------------------------------------------------------


def rank_and_size() -> tuple[int, int]:
    """Return the number of this process in its group, and the number of all."""
    if "torch.distributed" in sys.modules and "mpi4py.MPI" not in sys.modules:
        distributed = sys.modules["torch.distributed"]
        return distributed.get_rank(), distributed.get_world_size()
    world = sys.modules["mpi4py.MPI"].COMM_WORLD
    return world.Get_rank(), world.Get_size()


def _run_member(folder: Path, engine: str) -> None:
    """Enter the group, call the function that the folder holds, and write what it returns.

    Its error ends the process, as it does with users.
    """
    function, arguments, record = pickle.loads((folder / REQUEST).read_bytes())
    if engine == "mpi":
        import mpi4py.MPI  # noqa: F401
    else:
        import torch.distributed

        torch.distributed.init_process_group("gloo")
    path = folder / f"result-{rank_and_size()[0]}"
    recorder = None
    if record:
        from coverage import Coverage

        recorder = Coverage(data_suffix=True, config_file=False, **record)
        recorder.start()
    try:
        path.write_bytes(pickle.dumps((function(*arguments), "")))
    except BaseException as error:
        path.write_bytes(pickle.dumps((None, f"{type(error).__name__}: {error}")))
        raise
    finally:
        if recorder:
            recorder.stop()
            recorder.save()
    if engine == "torch":
        sys.modules["torch.distributed"].destroy_process_group()  # its threads must end before


def _end_forked(run: Callable[[], None]) -> None:
    """Run, and end this process as Python does, but for what onnxruntime does at the end.

    It waits for a thread that the import has started, which a forked process does not have.
    """
    code = 0
    try:
        run()
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    engine, *rest = sys.argv[1:]
    if engine != "fork":
        _run_member(Path(*rest), engine)
    elif (member := _serve()) is not None:
        _end_forked(lambda: _run_member(*member))
