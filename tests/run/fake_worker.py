"""A worker that measures in no time and in this process."""

from cs336sys.errors import Terminated
from cs336sys.results.model import Run
from cs336sys.run.cells import Outcome

STATUSES = {"out of memory": "oom", "raise": "error"}


class FakeWorker:
    run = Run("abc123", "now", ("bench",), {"gpu": "NVIDIA H200", "gpus": 2, "torch": None}, {"source_digest": "1"})

    def __init__(self, measure, arguments, *, silence_s):
        pass

    def start(self, *, timeout_s):
        return None

    def measure(self, configuration, *, timeout_s, progress):
        if configuration["action"] == "terminate":
            raise Terminated
        return Outcome(STATUSES.get(configuration["action"], "ok"), reason=configuration.get("reason"))

    def close(self):
        pass
