"""The signals that ask a run to stop: Ctrl-C, a scheduler's, and that of a terminal which is closed."""

import signal

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP")  # the last is not everywhere
STOPPING = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))
