"""What a shell offers where the value of an option is to be typed; files are offered by the shell itself."""

from collections.abc import Callable, Collection

# By typer's contract: called with what stands there so far.
Completion = Callable[[str], list[str]]


def among(names: Collection[str]) -> Completion:
    """For an option that takes one of the names, or several after commas: those that are not given yet."""

    def complete(incomplete: str) -> list[str]:
        given, comma, last = incomplete.rpartition(",")
        return [f"{given}{comma}{name}" for name in names if name.startswith(last) and name not in given.split(",")]

    return complete
