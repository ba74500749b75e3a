"""What the tests of the command line share."""

from tests.support.commands import working_folder as here  # noqa: F401
