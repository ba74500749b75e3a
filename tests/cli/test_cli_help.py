"""The help, the completion of the shell, and the documents of the command line."""

import re
import shlex
import subprocess
import sys
from collections import Counter
from inspect import isfunction
from typing import get_type_hints

import onnx
import pytest
from tiers import page_commands

from onnxgrad import __version__
from onnxgrad.cli import command_options
from onnxgrad.cli.command import COMMANDS as DECLARED, build_command
from onnxgrad.cli.command_help import OTHER_NAMES
from onnxgrad.cli.command_options import EvalOptions, TrainOptions
from onnxgrad.cli.options import OptionField
from onnxgrad.losses.formulas import LOSSES
from onnxgrad.losses.spec import ALIASES
from onnxgrad.metrics.select import METRICS, select_metric
from onnxgrad.optimizers.presets import OPTIMIZERS, WHOLE_TENSORS
from onnxgrad.schedules import base, curves
from onnxgrad.schedules.base import Schedule
from onnxgrad.schedules.curves import SCHEDULES
from tests.support.commands import as_json, assert_names, refusal, run_command, succeed
from tests.support.models import parse_model
from tests.support.paths import DOCS

COMMANDS = (
    "train", "eval", "predict", "trainable", "losses", "grad", "check", "merge", "report", "show"
)  # fmt: skip
MANY_OPTIONS = {"train": TrainOptions, "eval": EvalOptions}
REGISTRIES = {
    "loss": {*LOSSES, *ALIASES},
    "optimizer": {*OPTIMIZERS, *WHOLE_TENSORS},
    "schedule": {*SCHEDULES},
}


@pytest.mark.parametrize("kind", REGISTRIES)
def test_the_help_names_what_the_registries_hold(kind):
    text = OptionField.fields_of(TrainOptions)[kind].help
    words = re.findall(r"\w+", re.match(r"One of (.*?)\.", text)[1])
    assert sorted(set(words) - {"or"}) == sorted(REGISTRIES[kind])
    assert len(words) == len(set(words))


def test_the_metrics_of_the_help_exist():
    for options in (TrainOptions, EvalOptions):
        text = OptionField.fields_of(options)["metrics"].help
        names = re.search(r"such as (.*?);", text)[1].split(", ")
        assert len(names) > 5
        for name in names:
            assert select_metric(name).name == name


def test_schedules_are_those_of_the_package():
    functions = {
        name
        for module in (base, curves)
        for name, value in vars(module).items()
        if isfunction(value) and value.__module__ == module.__name__ and name != "select"
        if get_type_hints(value).get("return") in (Schedule, *Schedule.__subclasses__())
    }
    assert functions == set(SCHEDULES)


def test_every_command_has_help():
    text = succeed("--help").stdout
    assert all(name in text for name in COMMANDS)
    for name in COMMANDS:
        shown = succeed(name, "--help").stdout
        assert "Exit codes: 0: " in " ".join(shown.replace("│", " ").split())
        assert "--json" in shown
    assert succeed("--version").stdout == f"onnxgrad {__version__}\n"


def shown_options(*arguments):
    """Return the options that a help lists in its panels, without their further names."""
    return re.findall(r"^│ (--[a-z-]+)", succeed(*arguments).stdout, re.M)


@pytest.mark.parametrize(("command", "options"), MANY_OPTIONS.items())
def test_the_help_shows_usual_options_and_all_on_demand(command, options):
    fields = [each for each in OptionField.fields_of(options).values() if not each.positional]
    flags = {each.names[0] if each.names else each.flag for each in fields}
    usual = {each.names[0] if each.names else each.flag for each in fields if each.usual}
    short, whole = shown_options(command, "--help"), shown_options(command, "--help-all")
    assert set(short) == usual | {"--help"}
    assert set(whole) == flags | {"--help"}
    last = succeed(command, "--help", prog_name="onnxgrad").stdout.splitlines()[-1]
    assert last.strip() == f"{len(flags - usual)} more options: onnxgrad {command} --help-all"
    assert "more options" not in succeed(command, "--help-all").stdout


def test_the_help_of_few_options_shows_all():
    for command in set(COMMANDS) - set(MANY_OPTIONS):
        text = succeed(command, "--help", prog_name="onnxgrad").stdout
        assert "--debug" in text
        assert "--help-all" not in text


def test_usual_options_of_a_training_are_about_twenty_and_hold_the_examples_of_the_manual():
    """--normalize is for images only."""
    usual = {each.flag for each in OptionField.fields_of(TrainOptions).values() if each.usual}
    assert 20 <= len(usual) <= 25
    lines = [shlex.split(line) for line in page_commands() if line.startswith("train ")]
    used = Counter(word for line in lines for word in line if word.startswith("--"))
    used["--learning-rate"] += used.pop("--lr", 0)
    assert {option for option, count in used.items() if count > 2} <= usual | {"--normalize"}


@pytest.mark.parametrize("arguments", [(), *((name,) for name in COMMANDS)])
def test_no_help_shows_a_type_beside_flags(arguments):
    option = "--help-all" if arguments and arguments[0] in MANY_OPTIONS else "--help"
    text = succeed(*arguments, option).stdout
    assert "bool" not in text.lower()


# of all commands: each takes a tenth of the time of a short command, or longer
HEAVY = "onnxruntime pydantic pydantic_core pyarrow matplotlib jinja2 scipy sklearn sympy torch"
LIBRARIES = "numpy onnx onnx_ir onnxgrad.operators onnxgrad.training onnxgrad.losses"
RICH = "rich.console rich.table"  # typer 0.16 imports them for every command


@pytest.mark.parametrize(
    ("command", "heavy"),
    [
        ("--help", LIBRARIES),
        ("--version", LIBRARIES),
        ("train --help", LIBRARIES),
        ("losses", "onnxgrad.model.read onnxgrad.training onnxgrad.losses.objectives"),
        pytest.param("losses", RICH, marks=pytest.mark.newest),
        (
            "trainable model.onnx",
            "onnxgrad.training.trainer onnxgrad.language onnxgrad.losses onnxgrad.autodiff",
        ),
        pytest.param("trainable model.onnx", RICH, marks=pytest.mark.newest),
        ("show model.onnx", "onnxgrad.training.trainer onnxgrad.language onnxgrad.losses"),
    ],
)
def test_short_commands_import_little(command, heavy, tmp_path):
    model = parse_model(
        "f (float[N,2] x) => (float[N,1] y) <float[2,1] w = {1, 2}> { y = MatMul(x, w) }"
    )
    onnx.save(model, tmp_path / "model.onnx")
    names = f"{HEAVY} {heavy}".split()
    code = (
        "import sys\nfrom onnxgrad.cli import app\n"
        f"try:\n    app({command.split()}, prog_name='onnxgrad')\n"
        "except SystemExit as e:\n"
        f"    print(e.code, [name for name in {names} if name in sys.modules])"
    )
    made = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path
    )
    assert made.stdout.splitlines()[-1] == "0 []", made.stderr


def test_only_the_command_that_runs_is_built(monkeypatch):
    built = set()

    def build_and_note(name):
        built.add(name)
        return build_command(name)

    monkeypatch.setattr("onnxgrad.cli.command.build_command", build_and_note)
    succeed("losses")
    assert built == {"losses"}
    succeed("--help")
    assert built == set(DECLARED)


def test_options_take_their_names_only_and_share_no_list():
    assert TrainOptions(epochs=3).epochs == 3
    TrainOptions().freeze.append("w")
    assert TrainOptions().freeze == []
    with pytest.raises(TypeError, match="epoch"):
        TrainOptions(epoch=3)


def test_texts_of_numbers_are_checked():
    for flag, wrong in {"--epochs": "two", "--max-length": "1", "--learning-rate": "fast"}.items():
        result = run_command("train", "model.onnx", "data.csv", flag, wrong)
        assert result.exit_code == 2
        assert_names(result.stderr, f"Invalid value for '{flag}'")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        *OTHER_NAMES.items(),
        ("trian", "train"),
        ("predicts", "predict"),
    ],
)
def test_an_unknown_command_suggests_what_it_means(typed, meant):
    result = run_command(typed, "model.onnx")
    assert result.exit_code == 2
    words = " ".join(result.stderr.replace("│", " ").split())
    assert f"Unknown command '{typed}'. Did you mean '{meant}'" in words
    assert meant in COMMANDS


@pytest.mark.parametrize("options", [options for options, _ in DECLARED.values()])
def test_every_option_is_described(options):
    for name, each in OptionField.fields_of(options).items():
        assert re.search(r"\w.*\.$", each.help), name


def test_losses_and_their_options_are_listed():
    """All of them, with the defaults of the formulas and the first line of their docstrings."""
    listed = as_json("losses")["losses"]
    assert sorted(name for one in listed for name in one["names"]) == sorted(REGISTRIES["loss"])
    text = succeed("losses").stdout
    for one in listed:
        spec = LOSSES[next(n for n in one["names"] if n in LOSSES)]
        assert one["mathematics"] == spec.formula.__doc__.split("\n")[0]
        assert one["mathematics"] in text
        own = spec.all_options.keys() - {"ignore_nan"}  # which most losses have beside their own
        assert one["options"].keys() - {"ignore_nan"} == own
    [mse] = as_json("losses", "mse")["losses"]
    assert {"squared_error", "l2", "mse"} == {*mse["names"]}
    ctc = succeed("losses", "ctc").stdout
    assert_names(ctc, "Graves et al. 2006", "--loss-option blank=0\n", "labels: int64")
    assert_names(ctc, "--loss-option from_logits=null  (")
    assert "'ctc'" in refusal("losses", "ct")
    assert "onnxgrad losses NAME" in " ".join(succeed("train", "--help-all").stdout.split())


def completed(line, shell="bash"):
    """Return what the shell would be offered."""
    words = line.split(" ")
    variables = {"_ONNXGRAD_COMPLETE": f"complete_{shell}", "COMP_WORDS": line}
    variables["COMP_CWORD"] = str(len(words) - 1)
    variables["_TYPER_COMPLETE_ARGS"] = line
    made = run_command(prog_name="onnxgrad", env=variables)
    return made.stdout.split()


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("onnxgrad tra", {"train", "trainable"}),
        ("onnxgrad train --loss cross", {"cross_entropy"}),
        (
            "onnxgrad train --optimizer ada",
            {n for n in OPTIMIZERS if n.startswith("ada")} | {"adafactor"},
        ),
        ("onnxgrad train --schedule c", {"constant", "cosine"}),
        ("onnxgrad eval --metrics f1", {n for n in METRICS if n.startswith("f1")}),
    ],
)
def test_names_are_completed(line, names):
    assert set(completed(line)) == names


def test_functions_that_complete_know_the_registries():
    assert set(command_options.complete_loss("")) == REGISTRIES["loss"]
    assert set(command_options.complete_optimizer("")) == REGISTRIES["optimizer"]
    assert set(command_options.complete_schedule("")) == REGISTRIES["schedule"]


def test_the_shell_can_install_completion(monkeypatch):
    # typer looks for a shell among the parents, where a detached run of the tests has none
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    made = succeed("--show-completion", "bash", prog_name="onnxgrad")
    assert "complete_bash" in made.stdout


def test_the_page_lists_every_command():
    page = (DOCS / "cli.md").read_text()
    for name in COMMANDS:
        assert f"\n| [`onnxgrad {name}`](cli/" in page


def test_commands_of_pages_lack_only_their_files(tmp_path, monkeypatch):
    """In an empty folder, each is refused for a model, data or a folder that is not there."""
    monkeypatch.chdir(tmp_path)
    lines = sorted(page_commands())
    assert len(lines) > 50
    for line in lines:
        command, *words = shlex.split(line)
        result = run_command(command, *words)
        if command == "losses" or line == "check":
            assert result.exit_code == 0
        else:
            assert result.exit_code == 2, line
            files = [word for word in words if not word.startswith("-")]
            assert any(word in result.stderr for word in files), (line, result.stderr)
    assert list(tmp_path.iterdir()) == []
