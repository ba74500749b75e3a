"""The listings of `docs/phones.md`, compiled and run, compute the steps of Python."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from safetensors.numpy import load_file, save_file

import onnxgrad as og
from tests.support.models import add_initializers
from tests.support.paths import ROOT
from tests.support.running import PATIENCE

pytestmark = [
    pytest.mark.sweep,
    pytest.mark.timeout(PATIENCE),
    pytest.mark.skipif(
        (sys.platform, platform.machine()) != ("linux", "x86_64"), reason="needs Linux x86-64"
    ),
]

CLIENTS = ROOT / "clients"
# onnxruntime 1.29 for Unity: the C and C++ headers, the Java classes and the library of the package
# for Android, the sources of the package for .NET, and the shared library for Linux
PACKAGE = "com.github.asus4.onnxruntime@0.4.9"
VERSION = "VERS_1.29.0"  # the version of the symbols of that library
STEPS = 20

Train = Callable[[Path, Path, Path, int], None]
"""Train by the artifacts in a folder, on a file of data, from and to a file of state."""

NORMALIZED = """
    <ir_version: 9, opset_import: ["": 18]>
    normalized (float[N,6] image) => (float[N,3] logits) {
        h = Gemm(image, w1, b1)
        n = BatchNormalization(h, scale, shift, mean, var)
        d = Dropout(n, ratio)
        r = Relu(d)
        logits = MatMul(r, w2)
    }
"""
WIDE = """
    <ir_version: 9, opset_import: ["": 18]>
    wide (double[8,6] x) => (double[8,1] y) {
        h = Gemm(x, w1, b1)
        r = Tanh(h)
        y = MatMul(r, w2)
    }
"""


def run_tool(*command: object, folder: Path, **variables: str) -> None:
    """Run a command in a folder; fail with what it printed if it fails."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]


def require_programs(*names: str) -> None:
    """Skip a test if a program is not installed."""
    for name in names:
        if not shutil.which(name):
            pytest.skip(f"needs {name}")


def module_folder(name: str, package: str) -> Path:
    """Return the folder of a module of a package of PyPI; skip the test if it is not installed."""
    spec = importlib.util.find_spec(name)
    if spec is None:
        pytest.skip(f"needs {package} of PyPI")
    return Path(next(iter(spec.submodule_search_locations)))


def unpack_runtime() -> Path:
    """Return the folder of onnxruntime's package, which npm downloads once."""
    require_programs("npm")
    filelock = pytest.importorskip("filelock")
    cache = ROOT / ".pytest_cache"
    cache.mkdir(exist_ok=True)
    home = cache / PACKAGE
    with filelock.FileLock(cache / "onnxruntime.lock", timeout=PATIENCE):
        if home.exists():
            return home
        packed = subprocess.run(
            ["npm", "pack", "--silent", "--pack-destination", cache, PACKAGE],
            capture_output=True,
            text=True,
        )
        if packed.returncode:
            pytest.skip(f"npm cannot load {PACKAGE}: {packed.stderr[-300:]}")
        archive, partial = cache / packed.stdout.split()[-1], cache / f"{PACKAGE}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        unpack_needed_files(archive, partial)
        archive.unlink()
        partial.rename(home)
    return home


def unpack_needed_files(archive: Path, folder: Path) -> None:
    """Unpack the headers, classes, sources and libraries of the package that listings need."""
    with tarfile.open(archive) as files:
        for member in files:
            name = member.name.removeprefix("package/")
            if name == "Plugins/Android/onnxruntime.aar":
                content = io.BytesIO(files.extractfile(member).read())
                zipfile.ZipFile(content).extractall(folder / "android")
            elif name == "Plugins/Linux/x64/libonnxruntime.so" or (
                name.startswith("Runtime/") and name.endswith(".cs") and "Training" not in name
            ):
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(files.extractfile(member).read())


# -- C++ -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cpp(tmp_path_factory: pytest.TempPathFactory) -> Train:
    """The C++ listing with the shared library of Python's onnxruntime."""
    require_programs("g++")
    if not Path("/usr/include/nlohmann/json.hpp").exists():
        pytest.skip("needs nlohmann-json3-dev of Debian")
    if tuple(map(int, ort.__version__.split(".")[:2])) < (1, 29):
        pytest.skip("needs onnxruntime 1.29")
    [library] = Path(ort.__file__).parent.glob("capi/libonnxruntime.so.1.*")
    home, headers = tmp_path_factory.mktemp("cpp"), unpack_runtime() / "android" / "headers"
    for name in ("libonnxruntime.so", "libonnxruntime.so.1"):
        (home / name).symlink_to(library)
    options = ("-std=c++17", "-Wall", "-Wextra", "-Werror", "-I", headers)
    linked = ("-L.", "-lonnxruntime", f"-Wl,-rpath,{home}")
    run_tool("g++", *options, CLIENTS / "cpp" / "train.cpp", *linked, "-o", "train", folder=home)
    return lambda *arguments: run_tool(home / "train", *arguments, folder=home)


# -- Kotlin ----------------------------------------------------------------------------------------

MAIN = """
import java.io.File

fun main(arguments: Array<String>) {
    val (artifacts, data, saved) = arguments.map { File(it) }
    train(artifacts, data, saved, arguments[3].toInt())
}
"""
# What the library of the Android package calls of Android's C library, by glibc.
BIONIC = """
#include <stdlib.h>
#include <string.h>
extern void *__libc_malloc(size_t), *__libc_realloc(void *, size_t);
extern void __libc_free(void *);
void *malloc(size_t size) { return __libc_malloc(size); }
void *realloc(void *old, size_t size) { return __libc_realloc(old, size); }
void free(void *old) { __libc_free(old); }
void *memcpy(void *to, const void *from, size_t size) { return memmove(to, from, size); }
size_t strlen(const char *text) { return strnlen(text, -1); }
int __cxa_atexit(void) { return 0; }
void __cxa_finalize(void) {}
int __register_atfork(void) { return 0; }
void __stack_chk_fail(void) { abort(); }
int dlclose(void *handle) { return handle == 0; }
void OrtSessionOptionsAppendExecutionProvider_Nnapi(void) { abort(); }
"""
BIONIC_VERSIONS = f"""
LIBC {{ global: malloc; realloc; free; memcpy; strlen; __cxa_*; __register_atfork;
        __stack_chk_fail; dlclose; local: *; }};
{VERSION} {{ global: OrtSessionOptionsAppendExecutionProvider_Nnapi; }};
"""


@pytest.fixture(scope="module")
def kotlin(tmp_path_factory: pytest.TempPathFactory) -> Train:
    """The Kotlin listing with the Java classes and the library of the package for Android."""
    require_programs("java", "gcc")
    json_classes = Path("/usr/share/java/com.android.json.jar")
    if not json_classes.exists():
        pytest.skip("needs libandroid-json-java of Debian")
    jars = module_folder("run_kotlin_kernel", "kotlin-jupyter-kernel") / "jars"
    home, package = tmp_path_factory.mktemp("kotlin"), unpack_runtime()
    android = package / "android"
    (home / "Main.kt").write_text(MAIN)
    [standard] = jars.glob("kotlin-stdlib-*.jar")
    classes = os.pathsep.join(map(str, [android / "classes.jar", json_classes, standard]))
    run_tool(
        *("java", "-cp", f"{jars}/*", "org.jetbrains.kotlin.cli.jvm.K2JVMCompiler"),
        *("-no-stdlib", "-no-reflect", "-cp", classes, "-d", "classes"),
        *(CLIENTS / "android" / "Train.kt", "Main.kt"),
        folder=home,
    )
    native = home / "native"
    native.mkdir()
    (native / "bionic.c").write_text(BIONIC)
    (native / "bionic.map").write_text(BIONIC_VERSIONS)
    for name in ("libc.so", "libm.so", "libdl.so"):
        run_tool(
            *("gcc", "-shared", "-fPIC", "-fno-builtin", "-w", "bionic.c", "-o", name),
            *("-Wl,--version-script=bionic.map", f"-Wl,-soname,{name}"),
            folder=native,
        )
    shutil.copy(android / "jni" / "x86_64" / "libonnxruntime4j_jni.so", native)
    shutil.copy(package / "Plugins" / "Linux" / "x64" / "libonnxruntime.so", native)
    java = ("java", f"-Donnxruntime.native.path={native}", "-cp", f"classes:{classes}", "MainKt")
    return lambda *arguments: run_tool(*java, *arguments, folder=home, LD_LIBRARY_PATH=str(native))


# -- C# --------------------------------------------------------------------------------------------

OLDER_SYNTAX = [  # what Mono's compiler does not read in onnxruntime's sources, and what it reads
    (r"\busing var ", "var "),
    (r" is null\b", " == null"),
    (r"\((\S+) is not (\w+)\)", r"(!(\1 is \2))"),
    (r"\bstatic ptr =>", "ptr =>"),
    (r"(DisposableList<OrtValue>) (\w+) = new\(", r"\1 \2 = new \1("),
    (r"\bunmanaged\b", "struct"),
    (r"(?m)^(\s*)(\w+)\.Span\[(\w+)\] = (.*);", r"\1{ var span = \2.Span; span[\3] = \4; }"),
    (r"(\w+\[0\]) = (\w+\[1\]) = (\w+);", r"\1 = \3; \2 = \3;"),
]
RUNTIME = {
    "runtimeOptions": {"framework": {"name": "Microsoft.NETCore.App", "version": "3.1.0"}},
}


@pytest.fixture(scope="module")
def csharp(tmp_path_factory: pytest.TempPathFactory) -> Train:
    """The C# listing with onnxruntime's C# sources, on .NET Core."""
    require_programs("mcs")
    dotnet = module_folder("dotnetcore2", "dotnetcore2") / "bin"
    [framework] = dotnet.glob("shared/Microsoft.NETCore.App/*")
    home, package = tmp_path_factory.mktemp("csharp"), unpack_runtime()
    (home / "sources").mkdir()
    for path in (package / "Runtime").rglob("*.cs"):
        text = path.read_text("utf-8-sig")
        for newer, older in OLDER_SYNTAX:
            text = re.sub(newer, older, text)
        (home / "sources" / path.name).write_text(text)
    references = [*framework.glob("System*.dll"), framework / "mscorlib.dll"]
    (home / "references.rsp").write_text("\n".join(f"-r:{path}" for path in references))
    compiler = ("mcs", "-noconfig", "-nostdlib", "-langversion:latest", "@references.rsp")
    library = ("-unsafe", "-define:NETSTANDARD2_0", "-target:library", "-out:Runtime.dll")
    run_tool(*compiler, *library, *sorted((home / "sources").iterdir()), folder=home)
    listing = CLIENTS / "dotnet" / "Train.cs"
    run_tool(*compiler, "-r:Runtime.dll", "-out:Train.dll", listing, folder=home)
    (home / "Train.runtimeconfig.json").write_text(json.dumps(RUNTIME))
    shutil.copy(package / "Plugins" / "Linux" / "x64" / "libonnxruntime.so", home)
    variables = {"LD_LIBRARY_PATH": str(home), "DOTNET_SYSTEM_GLOBALIZATION_INVARIANT": "1"}
    return lambda *arguments: run_tool(
        dotnet / "dotnet", "Train.dll", *arguments, folder=home, **variables
    )


# -- the comparison --------------------------------------------------------------------------------


def write_normalized_artifacts(folder: Path) -> None:
    """Write artifacts with buffers and dropout in float32, and rows of data."""
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model(NORMALIZED)
    ones, zeros = np.ones(5, np.float32), np.zeros(5, np.float32)
    weights = {"w1": rng.standard_normal((6, 5)), "w2": rng.standard_normal((5, 3))}
    weights = {name: array.astype(np.float32) for name, array in weights.items()}
    weights |= {"b1": zeros, "scale": ones, "shift": zeros, "mean": zeros, "var": ones}
    add_initializers(model, weights | {"ratio": np.float32(0.25)})
    og.artifacts.generate_artifacts(
        *(model, None, None, "CrossEntropyLoss", "AdamW", folder),
        batch_norm="train",
        dropout={"d": 0.25},
        learning_rate=0.01,
    )
    images = rng.standard_normal((50, 6)).astype(np.float32)
    labels = rng.integers(0, 3, 50)
    save_file({"image": images, "label": labels}, folder / "data.safetensors")


def write_double_artifacts(folder: Path) -> None:
    """Write artifacts in float64 with a fixed number of rows, and rows of data."""
    rng = np.random.default_rng(1)
    model = onnx.parser.parse_model(WIDE)
    shapes = {"w1": (6, 4), "b1": (4,), "w2": (4, 1)}
    add_initializers(model, {name: rng.standard_normal(shape) for name, shape in shapes.items()})
    og.artifacts.generate_artifacts(model, None, None, "MSELoss", "adam", folder)
    rows = rng.standard_normal((20, 6))
    save_file({"x": rows, "label": np.sin(rows[:, :1])}, folder / "data.safetensors")


def trained_state(folder: Path) -> dict[str, np.ndarray]:
    """Return the weights, slots and buffers after the steps, computed by Python's onnxruntime."""
    manifest = json.loads((folder / "training.json").read_text())
    session = ort.InferenceSession(folder / "step.onnx")
    state, data = (load_file(folder / f"{x}.safetensors") for x in ("checkpoint", "data"))
    outputs = [y.name for y in session.get_outputs()]
    [first, *_] = manifest["inputs"][0]["shape"]
    rows = first if isinstance(first, int) else 32
    for step in range(STEPS):
        taken = np.arange(step * rows, (step + 1) * rows)
        fed = {name: np.take(array, taken, axis=0, mode="wrap") for name, array in data.items()}
        numbers = {"minus_learning_rate": -manifest["learning_rate"], "step": step + 1}
        numbers["draw"] = step
        fed |= {x["name"]: np.array(numbers[x["name"]], x["dtype"]) for x in manifest["scalars"]}
        results = dict(zip(outputs, session.run(None, state | fed), strict=True))
        state = {name: results[f"{name}.new"] for name in state}
    return state


@pytest.mark.parametrize("write_artifacts", [write_normalized_artifacts, write_double_artifacts])
@pytest.mark.parametrize("language", ["cpp", "kotlin", "csharp"])
def test_listing(
    language: str,
    write_artifacts: Callable[[Path], None],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    """Two runs, the second from the state of the first, give the state of Python."""
    train = request.getfixturevalue(language)
    write_artifacts(tmp_path)
    saved = tmp_path / "saved.safetensors"
    for _ in range(2):
        train(tmp_path, tmp_path / "data.safetensors", saved, STEPS // 2)
    found, expected = load_file(saved), trained_state(tmp_path)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_allclose(found[name], array, rtol=1e-6, atol=1e-6, err_msg=name)
    initial = load_file(tmp_path / "checkpoint.safetensors")
    assert any(not np.array_equal(found[name], initial[name]) for name in found)
    og.artifacts.merge_artifacts(tmp_path, saved)
