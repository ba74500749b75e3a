"""What messages must name: wording may change without a change of tests."""

import re


def naming(*parts: str) -> str:
    """Return a pattern, for `match=`, of messages that contain every part in any order."""
    return "(?s)^" + "".join(f"(?=.*{re.escape(part)})" for part in parts)
