"""Output files: what is on disk after each way in which writing can go wrong."""

import ctypes
import os
import pty
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import matplotlib
import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnxgrad import add_loss_output, save
from onnxgrad.compat import (
    OrtGradientForwardBackward,
    OrtGradientForwardBackwardOptimizer,
    OrtGradientOptimizer,
)
from onnxgrad.model import external
from onnxgrad.model.files import replacement_file
from onnxgrad.model.write import write_models
from tests.support.commands import run_command
from tests.support.errors import naming
from tests.support.models import parse_model
from tests.support.running import PATIENCE, in_sweep

TRAIN = ("--target", "y", "--loss", "squared_error", "--optimizer", "sgd")
PRECIOUS = b"what was there before"


def saved_model(count=2, value=0.0):
    """Return a model with `count` weights, all of them `value`."""
    text = f"g (float[N,{count}] x) => (float[N,1] y) {{ y = MatMul(x, W) }}"
    return parse_model(text, W=np.full((count, 1), value, np.float32))


def saved_weight(path):
    """Return the weight of a model that was written."""
    return numpy_helper.to_array(onnx.load(path).graph.initializer[0])


@pytest.fixture
def work_folder(tmp_path, monkeypatch):
    """A folder with a model, data for it, and homes of their own for what is rescued."""
    folder = tmp_path / "here"
    for path in (folder, tmp_path / "home", tmp_path / "temporary"):
        path.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("MPLCONFIGDIR", matplotlib.get_cachedir())  # not in a new home
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr("tempfile.tempdir", None)
    onnx.save(saved_model(), "m.onnx")
    x = np.random.default_rng(0).normal(size=(200, 2)).astype(np.float32)
    np.savez("d.npz", x=x, y=x @ np.float32([[2], [-1]]))
    return folder


def leftovers(folder):
    return [f for f in os.listdir(folder) if "onnxgrad" in f]


# -- what is no regular file ------------------------------------------------------------------


def device(path):
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("creating a device is not permitted")


def listening(path):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))


SPECIAL = {
    "character device": device,
    "named pipe": os.mkfifo,
    "socket": listening,
    "folder": os.mkdir,
}


@pytest.mark.parametrize("through", ["itself", "link"])
@pytest.mark.parametrize("kind", SPECIAL)
def test_only_regular_files_are_replaced(work_folder, kind, through):
    SPECIAL[kind]("special")
    before, output = os.lstat("special"), "special"
    if through == "link":
        output = "link"
        os.symlink("special", output)
    with pytest.raises(OSError, match=kind) as error:
        save(saved_model(), output)
    assert error.value.filename == output
    for command in (("train", "m.onnx", "d.npz", *TRAIN), ("grad", "m.onnx")):
        result = run_command(*command, "--output", output, "--overwrite")
        assert result.exit_code == 2, result.output
        [line] = result.stderr.splitlines()
        assert f"cannot write {output}: this is a {kind}" in line
    after = os.lstat("special")
    assert (after.st_mode, after.st_ino, after.st_rdev) == (
        before.st_mode,
        before.st_ino,
        before.st_rdev,
    )
    assert through == "itself" or os.readlink("link") == "special"
    assert not leftovers(work_folder)


def test_curves_are_no_device_either(work_folder):
    device("trained.png")
    result = run_command("train", "m.onnx", "d.npz", *TRAIN, "--overwrite")
    assert result.exit_code == 2
    assert "trained.png: this is a character device" in result.stderr
    assert stat.S_ISCHR(os.lstat("trained.png").st_mode)
    assert not Path("trained.onnx").exists()


@pytest.mark.parametrize("output", ["nodir/", "file/", "folder/", "folder/.", "folder/..", ""])
def test_the_name_of_a_folder_is_no_output(work_folder, output):
    os.mkdir("folder")
    Path("file").write_bytes(PRECIOUS)
    before = sorted(os.listdir())
    with pytest.raises(OSError, match="folder"):
        save(saved_model(), output)
    for command in (("train", "m.onnx", "d.npz", *TRAIN), ("grad", "m.onnx")):
        result = run_command(*command, "--output", output, "--overwrite")
        assert result.exit_code == 2, result.output
        [line] = result.stderr.splitlines()
        assert "cannot write" in line
        assert "folder" in line
    assert sorted(os.listdir()) == before
    assert Path("file").read_bytes() == PRECIOUS


# -- links, modes -----------------------------------------------------------------------------


def test_a_link_stays_one_and_its_target_gets_the_data(work_folder):
    os.mkdir("models")
    Path("models/real.onnx").write_bytes(PRECIOUS)
    os.symlink("real.onnx", "models/second")
    os.symlink("models/second", "first.onnx")
    save(saved_model(value=7), "first.onnx")
    assert os.readlink("first.onnx") == "models/second"
    assert os.readlink("models/second") == "real.onnx"
    assert saved_weight("models/real.onnx")[0] == 7
    command = ("train", "m.onnx", "d.npz", *TRAIN, "--output", "first.onnx", "--overwrite")
    result = run_command(*command)
    assert result.exit_code == 0, result.output
    assert os.readlink("first.onnx") == "models/second"
    assert saved_weight("models/real.onnx")[0] not in (0, 7)
    assert sorted(os.listdir("models")) == ["real.onnx", "second"]
    assert Path("first.png").is_file()


def test_a_link_to_nothing_leads_to_a_new_file(work_folder):
    os.mkdir("models")
    os.symlink("models/new.onnx", "link.onnx")
    save(saved_model(value=7), "link.onnx")
    assert os.readlink("link.onnx") == "models/new.onnx"
    assert saved_weight("models/new.onnx")[0] == 7


@pytest.mark.parametrize(
    ("target", "reason"), [("no/folder.onnx", "No such file"), ("link.onnx", "symbolic links")]
)
def test_a_link_that_leads_nowhere(work_folder, target, reason):
    os.symlink(target, "link.onnx")
    with pytest.raises(OSError, match=reason) as error:
        save(saved_model(), "link.onnx")
    assert error.value.filename == "link.onnx"
    assert os.readlink("link.onnx") == target


def test_other_hard_links_keep_the_old_data(work_folder):
    Path("other").write_bytes(PRECIOUS)
    os.link("other", "out.onnx")
    save(saved_model(value=7), "out.onnx")
    assert saved_weight("out.onnx")[0] == 7
    assert Path("other").read_bytes() == PRECIOUS


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666, 0o755])
def test_the_mode_stays(work_folder, mode):
    Path("out.onnx").write_bytes(PRECIOUS)
    os.chmod("out.onnx", mode)
    with replacement_file("out.onnx") as temporary:
        assert stat.S_IMODE(temporary.stat().st_mode) == 0o600  # nobody else reads it meanwhile
        temporary.write_bytes(b"new")
    assert stat.S_IMODE(os.stat("out.onnx").st_mode) == mode
    save(saved_model(), "out.onnx")
    assert stat.S_IMODE(os.stat("out.onnx").st_mode) == mode


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_a_new_file_has_the_mode_of_the_umask(work_folder, umask):
    before = os.umask(umask)
    try:
        save(saved_model(), "out.onnx")
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat("out.onnx").st_mode) == 0o666 & ~umask


def test_the_owner_stays_where_that_is_permitted(work_folder):
    Path("out.onnx").write_bytes(PRECIOUS)
    try:
        os.chown("out.onnx", 12345, 12346)
    except PermissionError:
        pytest.skip("changing owners is not permitted")
    save(saved_model(), "out.onnx")
    assert (os.stat("out.onnx").st_uid, os.stat("out.onnx").st_gid) == (12345, 12346)


def without_privileges():
    """Give up, in a child process, what lets root write where modes forbid it."""
    for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP


def child(code, **options):
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, **options)


WRITE = """
from onnxgrad.model.files import check_writable, replacement_file
for attempt in (lambda: check_writable("{0}", True), lambda: replacement_file("{0}").__enter__()):
    try:
        attempt()
        print("written")
    except OSError as e:
        print(e)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="drops capabilities of Linux")
@pytest.mark.parametrize(
    ("protected", "reason"), [("locked", "Permission denied"), ("locked/out.onnx", "read-only")]
)
def test_what_is_read_only_stays(work_folder, protected, reason):
    os.mkdir("locked")
    Path("locked/out.onnx").write_bytes(PRECIOUS)
    os.chmod(protected, 0o555 if protected == "locked" else 0o444)
    try:
        result = child(WRITE.format("locked/out.onnx"), preexec_fn=without_privileges)
    finally:
        os.chmod("locked", 0o755)
    lines = result.stdout.splitlines()
    assert len(lines) == 2, result.stderr
    assert all(reason in line and "locked/out.onnx" in line for line in lines), lines
    assert Path("locked/out.onnx").read_bytes() == PRECIOUS
    assert os.listdir("locked") == ["out.onnx"]


# -- the output is no input -------------------------------------------------------------------


def with_data():
    """Write a model whose data lie in another file."""
    onnx.save(
        saved_model(), "e.onnx", save_as_external_data=True, location="w.bin", size_threshold=0
    )
    return "e.onnx"


@pytest.mark.parametrize("through", ["name", "link", "hard link", "other spelling"])
@pytest.mark.parametrize(
    ("model", "victim"),
    [("m.onnx", "m.onnx"), ("m.onnx", "d.npz"), ("e.onnx", "e.onnx"), ("e.onnx", "w.bin")],
)
def test_the_output_is_not_an_input(work_folder, model, victim, through):
    with_data()
    before = Path(victim).read_bytes()
    output = {"name": victim, "other spelling": f"../here/{victim}"}.get(through, "out.onnx")
    if through == "link":
        os.symlink(victim, output)
    elif through == "hard link":
        os.link(victim, output)
    commands = [("train", model, "d.npz", *TRAIN)]
    commands += [("grad", model)] if victim != "d.npz" else []
    for command in commands:
        result = run_command(*command, "--output", output, "--overwrite")
        assert result.exit_code == 2, result.output
        [line] = result.stderr.splitlines()
        assert re.search(rf"{re.escape(output)} is the input file \S*{victim}: choose", line)
    assert Path(victim).read_bytes() == before
    assert not leftovers(work_folder)


@pytest.mark.parametrize("victim", ["m.onnx", "d.npz"])
def test_curves_are_not_written_over_an_input(work_folder, victim):
    before = Path(victim).read_bytes()
    os.link(victim, "trained.png")
    result = run_command("train", "m.onnx", "d.npz", *TRAIN, "--overwrite")
    assert result.exit_code == 2
    assert f"trained.png is the input file {victim}: choose" in result.stderr
    assert Path(victim).read_bytes() == before
    assert not Path("trained.onnx").exists()


def test_the_model_and_its_curves_are_two_files(work_folder):
    os.symlink("trained.png", "trained.onnx")
    result = run_command("train", "m.onnx", "d.npz", *TRAIN, "--overwrite")
    assert result.exit_code == 2
    assert "of the loss curves" in result.stderr
    assert not Path("trained.png").exists()


def test_python_may_replace_the_model_that_it_read(work_folder):
    for path in ("m.onnx", with_data()):
        trainer = fitted_trainer(path)
        save(trainer.get_trained_onnx(path), path)
        assert saved_weight(path)[0] != 0
    assert Path("w.bin").is_file()


def test_data_of_a_model_are_not_replaced_by_a_model(work_folder):
    before = Path(with_data()).with_name("w.bin").read_bytes()
    for model in ("e.onnx", Path("e.onnx")):
        with pytest.raises(ValueError, match=naming("w.bin", "external data", "another path")):
            save(model, "w.bin")
    assert Path("w.bin").read_bytes() == before


# -- names that are text of users -------------------------------------------------------------


@pytest.mark.parametrize("name", ["../../x", "/abs", "a/b", "..\\x", "a\nb", "a\0b", "../x"])
def test_a_class_name_does_not_lead_out_of_the_folder(work_folder, name):
    passes = OrtGradientForwardBackward(saved_model(), class_name=name)
    before = sorted(p for p in work_folder.parent.rglob("*"))
    with pytest.raises(ValueError, match="plain name"):
        passes.save_onnx_graph(work_folder / "a" / "b" / "c")
    assert sorted(p for p in work_folder.parent.rglob("*")) == before
    assert set(passes.save_onnx_graph(bytes)) == {
        "_trained_onnx",
        "_optimized_pre_grad_model",
        "_forward_onnx",
        "_backward_onnx",
    }


@pytest.mark.parametrize("models", [{"../x": 0}, {"ok": 0, "in": {"../x": 0}}, {"..": {"/x": 0}}])
def test_no_model_is_written_if_one_name_leads_out(work_folder, models):
    def filled(models):
        return {k: filled(v) if isinstance(v, dict) else saved_model() for k, v in models.items()}

    with pytest.raises(ValueError, match="plain name"):
        write_models(filled(models), "folder")
    with pytest.raises(ValueError, match="plain name"):
        write_models({"ok": saved_model()}, "folder", prefix="../")
    assert sorted(os.listdir()) == ["d.npz", "m.onnx"]


def test_no_link_leads_out_of_the_folder(work_folder):
    os.mkdir("folder")
    Path("outside.onnx").write_bytes(PRECIOUS)
    os.symlink("../outside.onnx", "folder/p.ok.onnx")
    with pytest.raises(ValueError, match=naming("p.ok.onnx", "the link")):
        write_models({"first": saved_model(), "ok": saved_model()}, "folder", prefix="p.")
    assert Path("outside.onnx").read_bytes() == PRECIOUS
    assert os.listdir("folder") == ["p.ok.onnx"]


def test_two_models_are_two_files(work_folder):
    with pytest.raises(ValueError, match=r"a\.b\.onnx: rename one"):
        write_models({"a": {"b": saved_model()}, "a.b": saved_model()}, "folder")
    assert not Path("folder").exists()


def test_all_graphs_are_in_the_folder(work_folder):
    os.symlink("real", "folder")
    os.mkdir("real")
    trainer = OrtGradientForwardBackwardOptimizer(saved_model(), ["W"])
    paths = trainer.save_onnx_graph("folder")
    assert paths["epoch_onnx_"] == str(Path("folder", "epoch_onnx_.onnx"))
    assert sorted(os.listdir()) == ["d.npz", "folder", "m.onnx", "real"]
    assert all(f.endswith(".onnx") for f in os.listdir("real"))


# -- a full disk ------------------------------------------------------------------------------


@pytest.fixture
def small_disk(work_folder):
    """A disk of 64 KB with a file on it; a model of more weights does not fit beside that."""
    os.mkdir("disk")
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", "disk"]
    try:
        mounted = subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("mounting is not permitted")
    disk = work_folder / "disk"
    (disk / "out.onnx").write_bytes(PRECIOUS)
    x = np.random.default_rng(0).normal(size=(64, 20000)).astype(np.float32)
    np.savez("wide.npz", x=x, y=x[:, :1])
    onnx.save(saved_model(20000), "wide.onnx")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


WIDE = ("train", "wide.onnx", "wide.npz", *TRAIN, "--epochs", 1, "--learning-rate", 1e-5)


def fitted_trainer(model):
    X = np.random.default_rng(0).normal(size=(64, saved_weight(model).size)).astype(np.float32)
    trainer = OrtGradientOptimizer(add_loss_output(model), ["W"], max_iter=1, learning_rate=1e-5)
    return trainer.fit(X, X[:, :1])


def test_a_full_disk_keeps_the_old_file_and_the_trained_weights(small_disk):
    trainer = fitted_trainer("wide.onnx")
    model = trainer.get_trained_onnx("wide.onnx")
    for name in ("out.onnx", "new.onnx"):
        with pytest.raises(OSError, match=naming("No space", "in memory")) as error:
            save(model, small_disk / name)
        assert error.value.filename == str(small_disk / name)
    assert os.listdir(small_disk) == ["out.onnx"]
    assert (small_disk / "out.onnx").read_bytes() == PRECIOUS
    save(trainer.get_trained_onnx("wide.onnx"), "elsewhere.onnx")
    np.testing.assert_array_equal(saved_weight("elsewhere.onnx"), trainer.trained_coef_["W"])
    assert np.any(saved_weight("elsewhere.onnx"))


def test_training_onto_a_full_disk_is_kept_elsewhere(small_disk, work_folder):
    result = run_command(*WIDE, "--output", small_disk / "out.onnx", "--overwrite")
    assert result.exit_code == 1, result.output
    assert f"{small_disk}/out.onnx: No space left on device\n" in result.stderr
    [kept] = re.findall(r"the trained model is kept in (\S+)", result.stderr)
    assert Path(kept).parent.parent == work_folder.parent / "home"
    assert f"wrote {kept}" in result.stdout
    assert np.any(saved_weight(kept))
    assert Path(kept).with_suffix(".png").is_file()
    assert os.listdir(small_disk) == ["out.onnx"]
    assert (small_disk / "out.onnx").read_bytes() == PRECIOUS


@pytest.fixture
def start_training(small_disk):
    """Return a function that starts a training whose disk is full, with a terminal to answer on."""
    keys, end = pty.openpty()

    def start(*options):
        command = [sys.executable, "-m", "onnxgrad", *map(str, WIDE), *options, "--overwrite"]
        return subprocess.Popen(
            [*command, "--output", str(small_disk / "out.onnx")],
            stdin=end,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ), keys

    yield start
    os.close(end)
    os.close(keys)


def state_of(process):
    """Return the letter that Linux has for what a process does: S where it waits."""
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_user_may_type_another_path(start_training, work_folder):
    process, keys = start_training()
    os.write(keys, b"m.onnx\n")  # exists: asks again
    os.write(keys, b"typed/\n")
    os.write(keys, b"~/typed.onnx\n")
    output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1, errors
    assert errors.count("Another path to write it to") == 3
    assert "m.onnx exists" in errors
    assert "cannot write typed/: this names a folder" in errors
    typed = work_folder.parent / "home" / "typed.onnx"
    assert f"wrote {typed}" in output
    assert np.any(saved_weight(typed))
    assert typed.with_suffix(".png").is_file()
    assert not leftovers(typed.parent)
    assert not np.any(saved_weight("m.onnx"))


@pytest.mark.parametrize(
    "answer", ["\n", signal.SIGINT, in_sweep("\x04"), in_sweep(signal.SIGTERM)]
)
def test_a_user_may_leave_the_model_where_it_is_kept(start_training, answer):
    process, keys = start_training("--no-curves")
    seen = ""
    while "Another path" not in seen:
        letter = process.stderr.read(1)
        assert letter, seen  # the process has ended
        seen += letter
    if isinstance(answer, str):
        os.write(keys, answer.encode())
    else:
        while state_of(process) != "S":  # between prompt and answer, input() misses a signal
            time.sleep(0.01)
        process.send_signal(answer)
    output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1, errors
    [kept] = re.findall(r"the trained model is kept in (\S+)", seen)
    assert f"wrote {kept}" in output
    assert np.any(saved_weight(kept))


def test_nothing_fits_anywhere(work_folder):
    """A limit for the size of files, which holds on every disk."""
    Path("out.onnx").write_bytes(PRECIOUS)
    onnx.save(saved_model(20000), "wide.onnx")
    code = f"""
import os, resource
from onnxgrad import save
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (10000, hard))
from onnxgrad.model.read import read
from onnxgrad.cli.model_files import ModelKeeper, OutputPath
from onnxgrad.cli.command import StopRequests
from pathlib import Path
model = read("wide.onnx")
try:
    save(model, "out.onnx")
except OSError as e:
    print(e.filename, e.strerror)
print(ModelKeeper(model, OutputPath(None), StopRequests(), print).write(Path("out.onnx"), True))
home = os.listdir({str(work_folder.parent / "home")!r})
print(sorted(os.listdir()), [name for name in home if name != ".cache"])  # of onnxruntime
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
save(model, "again.onnx")
"""
    result = child(code, stdin=subprocess.DEVNULL)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith("out.onnx File too large; nothing was replaced")
    assert lines[1] == "out.onnx: File too large"
    assert "lost: no other folder has room" in lines[2]
    assert lines[3] == "None"
    assert lines[4] == "['d.npz', 'm.onnx', 'out.onnx', 'wide.onnx'] []"
    assert Path("out.onnx").read_bytes() == PRECIOUS
    assert Path("again.onnx").read_bytes() == Path("wide.onnx").read_bytes()


def test_curves_that_cannot_be_written_cost_nothing_else(work_folder, monkeypatch):
    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", full)
    result = run_command("train", "m.onnx", "d.npz", *TRAIN)
    assert result.exit_code == 1
    assert "the loss curves are not written: trained.png: No space left on device" in result.stderr
    assert "wrote trained.onnx\n" in result.stdout
    assert saved_weight("trained.onnx")[0] != 0
    assert not Path("trained.png").exists()
    assert not leftovers(work_folder)


# -- several at once, and an end in between ---------------------------------------------------


def test_three_threads_write_one_file(work_folder):
    models = [saved_model(1000, value) for value in (1, 2, 3)]

    def often(model):
        for _ in range(20):
            save(model, "out.onnx")

    threads = [threading.Thread(target=often, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        if Path("out.onnx").exists():
            assert Path("out.onnx").read_bytes() in {m.SerializeToString() for m in models}
    assert saved_weight("out.onnx")[0] in (1, 2, 3)
    assert not leftovers(work_folder)


def test_three_threads_write_data_of_their_own(work_folder, monkeypatch):
    monkeypatch.setattr(external, "IN_MODEL", 0)
    models = [saved_model(1000, value) for value in (1, 2, 3)]
    threads = [threading.Thread(target=save, args=(model, "out.onnx")) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(saved_weight("out.onnx").ravel())) == 1
    save(saved_model(1000, 4), "out.onnx")
    assert set(saved_weight("out.onnx").ravel()) == {4}


def test_data_of_a_save_that_has_not_ended_are_no_leftovers(work_folder, monkeypatch):
    monkeypatch.setattr(external, "IN_MODEL", 0)
    write = external.write_filled

    def meanwhile(*arguments):
        monkeypatch.setattr(external, "write_filled", write)
        save(saved_model(1000, 1), "out.onnx")
        assert Path("out.onnx.1.data").stat().st_size
        write(*arguments)

    monkeypatch.setattr(external, "write_filled", meanwhile)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(saved_model(1000, 2), "out.onnx")
    assert set(saved_weight("out.onnx").ravel()) == {2}
    assert sorted(os.listdir()) == ["d.npz", "m.onnx", "out.onnx", "out.onnx.1.data"]


def test_three_processes_write_one_file(work_folder):
    code = """
import sys
from onnxgrad.model.files import replacement_file
for _ in range(50):
    with replacement_file("out") as temporary:
        temporary.write_bytes(sys.argv[1].encode() * 100_000)
"""
    processes = [subprocess.Popen([sys.executable, "-c", code, letter]) for letter in "abc"]
    assert [process.wait(timeout=PATIENCE) for process in processes] == [0, 0, 0]
    assert Path("out").read_bytes() in [letter * 100_000 for letter in (b"a", b"b", b"c")]
    assert not leftovers(work_folder)


def test_the_next_save_removes_what_kill_9_leaves(work_folder):
    Path("out.onnx").write_bytes(PRECIOUS)
    code = """
import sys, time
from onnxgrad.model.files import replacement_file
with replacement_file("out.onnx") as temporary:
    temporary.write_bytes(b"half")
    print("writing", flush=True)
    time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"writing\n"
    process.kill()
    process.communicate()
    assert Path("out.onnx").read_bytes() == PRECIOUS
    [stale] = leftovers(work_folder)
    assert stale.startswith(".onnxgrad-")
    save(saved_model(value=6), "other.onnx")
    with replacement_file("out.onnx") as running:  # of another thread, or process
        save(saved_model(value=7), "out.onnx")
        assert saved_weight("out.onnx")[0] == 7
        assert leftovers(work_folder) == [running.name]
        running.write_bytes(PRECIOUS)
    assert leftovers(work_folder) == []


@pytest.mark.parametrize("killed", ["_little_endian_bytes", "write_filled"])
def test_the_next_save_removes_or_names_data_that_kill_9_leaves(work_folder, monkeypatch, killed):
    if not (process := os.fork()):
        external.IN_MODEL = 0
        setattr(external, killed, lambda *arguments: os.kill(os.getpid(), signal.SIGKILL))
        try:
            save(saved_model(1000, 1), "out.onnx")
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL
    assert Path("out.onnx.1.data").exists()
    assert leftovers(work_folder) != []
    monkeypatch.setattr(external, "IN_MODEL", 0)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        save(saved_model(1000, 2), "out.onnx")
    assert leftovers(work_folder) == []
    assert saved_weight("out.onnx")[0] == 2
    data = sorted(path.name for path in work_folder.glob("*.data"))
    if killed == "_little_endian_bytes":  # nothing but an empty file had its name
        assert data == ["out.onnx.1.data"]
        assert not seen
    else:
        assert data == ["out.onnx.1.data", "out.onnx.2.data"]
        assert "out.onnx.1.data belongs to no model" in str(seen[0].message)


def test_temporary_names_are_random_and_opened_exclusively(work_folder, monkeypatch):
    with replacement_file("out.onnx") as one, replacement_file("out.onnx") as two:
        assert one != two
        assert one.parent == two.parent == work_folder
    random = os.urandom
    monkeypatch.setattr("os.urandom", lambda count: b"\0" * count if count == 8 else random(count))
    Path("victim").write_bytes(PRECIOUS)
    planted = work_folder / f".onnxgrad-new.onnx.{'00' * 8}"
    os.symlink("victim", planted)
    with pytest.raises(FileExistsError):
        save(saved_model(), "new.onnx")
    assert Path("victim").read_bytes() == PRECIOUS
    assert planted.is_symlink()
    assert not Path("new.onnx").exists()


def test_data_that_another_model_uses_are_not_removed(work_folder, monkeypatch):
    monkeypatch.setattr(external, "IN_MODEL", 0)
    save(saved_model(1000, 1), "a.onnx")
    save("a.onnx", "b.onnx")  # refers to a.onnx.1.data
    save(saved_model(1000, 2), "a.onnx")
    assert (saved_weight("a.onnx")[0], saved_weight("b.onnx")[0]) == (2, 1)
    save(saved_model(1000, 3), "b.onnx")
    save(saved_model(1000, 4), "a.onnx")
    assert (saved_weight("a.onnx")[0], saved_weight("b.onnx")[0]) == (4, 3)


def test_large_models_are_not_written_through_a_link_to_another_folder(work_folder, monkeypatch):
    monkeypatch.setattr(external, "IN_MODEL", 0)
    os.mkdir("models")
    Path("models/real.onnx").write_bytes(PRECIOUS)
    os.symlink("models/real.onnx", "link.onnx")
    with pytest.raises(OSError, match=r"save to .*real\.onnx"):
        save(saved_model(1000), "link.onnx")
    assert os.listdir("models") == ["real.onnx"]
    os.symlink("real.onnx", "models/beside.onnx")
    save(saved_model(1000, 7), "models/beside.onnx")
    assert saved_weight("models/real.onnx")[0] == saved_weight("models/beside.onnx")[0] == 7


# -- signals ----------------------------------------------------------------------------------


class Training:
    """`onnxgrad train` in a process of its own, on a terminal, so that its bar is drawn."""

    def __init__(self, *arguments, **options):
        self.terminal, end = pty.openpty()
        command = [sys.executable, "-m", "onnxgrad", "train", "m.onnx", "d.npz", *TRAIN]
        command += ["--no-curves"]  # which take as long as to start
        self.process = subprocess.Popen(
            [*command, "--epochs", "10000000", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=end,
            text=True,
            **options,
        )
        os.close(end)
        self.seen = ""

    def wait_for_steps(self):
        """Wait until enough epochs have ended: they take milliseconds."""
        while not re.search(r"loss (0\.0|\S+e-)", self.seen):
            self.seen += os.read(self.terminal, 4096).decode(errors="replace")

    def ended(self):
        """Return what it printed, and what it showed on the terminal."""
        reader = threading.Thread(target=self._read, daemon=True)
        reader.start()
        output = self.process.communicate(timeout=PATIENCE)[0]
        reader.join(PATIENCE)
        return output, " ".join(self.seen.split())

    def _read(self):
        try:
            while part := os.read(self.terminal, 4096):
                self.seen += part.decode(errors="replace")
        except OSError:  # the other end is closed
            pass


@pytest.mark.parametrize("name", ["SIGINT", in_sweep("SIGTERM"), in_sweep("SIGHUP")])
def test_a_signal_saves_what_was_trained(work_folder, name):
    Path("trained.onnx").write_bytes(PRECIOUS)
    number = getattr(signal, name)
    training = Training("--overwrite")
    training.wait_for_steps()
    training.process.send_signal(number)
    output, seen = training.ended()
    assert training.process.returncode == 128 + number
    assert f"interrupted by {name}; trained.onnx holds the weights of epoch " in seen
    assert "Traceback" not in seen
    assert output.count("wrote ") == 1
    np.testing.assert_allclose(saved_weight("trained.onnx"), [[2], [-1]], atol=0.5)
    assert not leftovers(work_folder)


def test_more_signals_do_not_disturb_saving(work_folder):
    training = Training()
    training.wait_for_steps()
    while training.process.poll() is None:
        for number in (signal.SIGTERM, signal.SIGHUP):
            training.process.send_signal(number)
        time.sleep(0.001)
    output, seen = training.ended()
    # 128 + n, or -n where one came after all was done
    assert training.process.returncode in (128 + signal.SIGTERM, -signal.SIGTERM, -signal.SIGHUP)
    assert "Traceback" not in seen
    assert output.count("wrote ") == 1
    assert saved_weight("trained.onnx").any()
    assert not leftovers(work_folder)


@pytest.mark.parametrize("name", ["SIGTERM", in_sweep("SIGINT"), in_sweep("SIGHUP")])
def test_nothing_trained_is_said(work_folder, name):
    """The signal comes while the data are awaited: from a pipe, into which nothing is written."""
    os.mkfifo("d.csv")
    number = getattr(signal, name)
    command = [sys.executable, "-m", "onnxgrad", "train", "m.onnx", "d.csv", *TRAIN]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with open("d.csv", "wb"):  # goes on once the other end is opened
        time.sleep(0.3)
        process.send_signal(number)
        output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + number
    assert not output
    assert "nothing was trained" in " ".join(errors.split())
    assert sorted(os.listdir()) == ["d.csv", "d.npz", "m.onnx"]


def test_what_is_ignored_stays_ignored(work_folder):
    """As `nohup` asks for."""
    training = Training(preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    training.wait_for_steps()
    training.process.send_signal(signal.SIGHUP)
    training.seen = ""
    training.wait_for_steps()
    training.process.send_signal(signal.SIGTERM)
    _, seen = training.ended()
    assert training.process.returncode == 128 + signal.SIGTERM
    assert "interrupted by SIGTERM" in seen


def test_a_terminal_that_goes_away(work_folder):
    def own_terminal():
        import fcntl
        import termios

        os.setsid()
        fcntl.ioctl(2, termios.TIOCSCTTY, 0)

    training = Training(preexec_fn=own_terminal)
    training.wait_for_steps()
    os.close(training.terminal)  # the system sends SIGHUP, and nothing can be shown any more
    output = training.process.communicate(timeout=PATIENCE)[0]
    assert training.process.returncode == 128 + signal.SIGHUP
    assert output.count("wrote ") == 1
    assert saved_weight("trained.onnx").any()


def test_a_closed_pipe_does_not_cost_the_training(work_folder):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "onnxgrad", "train", "m.onnx", "d.npz", *TRAIN]
    command += ["--no-curves"]
    process = subprocess.run(command, stdout=writer, stderr=writer, timeout=PATIENCE)
    os.close(writer)
    assert saved_weight("trained.onnx").any()
    assert process.returncode == 0


def test_a_file_that_came_into_being_meanwhile_is_kept(work_folder):
    training = Training()
    training.wait_for_steps()
    Path("trained.onnx").write_bytes(PRECIOUS)
    training.process.send_signal(signal.SIGINT)
    _, seen = training.ended()
    assert training.process.returncode == 1
    assert Path("trained.onnx").read_bytes() == PRECIOUS
    [kept] = work_folder.glob("onnxgrad-*/trained.onnx")
    assert f"is kept in {kept}" in seen
    assert saved_weight(kept).any()


def test_handlers_are_restored(work_folder):
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    assert run_command("grad", "m.onnx", "-o", "g.onnx").exit_code == 0
    assert [signal.getsignal(number) for number in numbers] == before


def test_a_command_in_a_thread_sets_no_handlers(work_folder):
    results, command = [], ("grad", "m.onnx", "-o", "g.onnx")
    thread = threading.Thread(target=lambda: results.append(run_command(*command)))
    thread.start()
    thread.join()
    assert results[0].exit_code == 0, results[0].output
