"""What all tests share."""

from __future__ import annotations

import signal

# Under nohup, or in the background of a script, signals are ignored, by children too. What has a
# handler is the default again in a child, and so tests can interrupt theirs.
for name in ("SIGINT", "SIGTERM", "SIGHUP"):
    if signal.getsignal(getattr(signal, name)) is signal.SIG_IGN:
        signal.signal(getattr(signal, name), lambda *_: None)
