"""What the tests of the documents share."""

from tests.support.commands import working_folder  # noqa: F401
