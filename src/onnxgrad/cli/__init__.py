"""The command line: commands that call the tasks in `onnxgrad.tasks`.

`app.py` lists the commands; their options are dataclasses whose docstrings are the help
(`options.py`, `train_options.py`, `command_options.py`), and `command.py` runs them with short
errors and exit codes. `tasks.py` opens the task that options and data mean; `train.py`,
`predict.py`, `inspect.py` and `transform.py` have the commands.
"""

from onnxgrad.cli.app import app

__all__ = ["app"]
