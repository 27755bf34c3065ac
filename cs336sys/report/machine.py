"""How a run's machine is named in titles."""

from cs336sys.results import Run


def machine_words(run: Run | None) -> list[str]:
    """The GPU or CPU and the versions that a title names."""
    if run is None:
        return []
    device = run.machine["gpu"] or run.machine["cpu"] or "unknown CPU"
    return [device, f"torch {run.machine['torch']}"]
