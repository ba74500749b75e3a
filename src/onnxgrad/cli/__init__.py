"""The command line: commands that call the tasks in `onnxgrad.tasks`.

`command.py` lists the commands, and runs them with short errors and exit codes; their options are
dataclasses whose docstrings are the help (`options.py`, `command_options.py`). `tasks.py` opens the
task that options and data mean; `train.py`, `predict.py`, `inspect.py`, `losses.py` and
`transform.py` have the functions of the commands.
"""

from onnxgrad.garbage import exempt_imported_modules

with exempt_imported_modules():
    from onnxgrad.cli.command import app

__all__ = ["app"]
