"""What the tests of records and reports share."""

from tests.support.commands import working_folder  # noqa: F401
