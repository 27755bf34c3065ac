"""What ends a command early: the errors that it ends with one sentence instead of a traceback, and Ctrl-C."""

# 128 and the number of SIGINT, as shells count.
INTERRUPTED = 130


class UsageError(ValueError):
    """What was asked for makes no sense: the command exits with 2."""

    exit_code = 2


class CapabilityError(RuntimeError):
    """What was asked for makes sense, but this machine or installation cannot do it: the command exits with 3."""

    exit_code = 3


class CaptureError(CapabilityError):
    """Work cannot be captured in a CUDA graph, as was noticed on the way: the process should compute nothing more."""
