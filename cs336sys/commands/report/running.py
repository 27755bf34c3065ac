"""Runs the commands of a write-up one after the other, each in a process of its own."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from cs336sys.commands.invocation.faults import say
from cs336sys.errors import CapabilityError
from cs336sys.processes.parent import Guarded, python_module
from cs336sys.report.course.plan import why_not
from cs336sys.report.course.target import Command, Target

# Commands that go on with what their --save file holds; the others take seconds.
_NOT_RESUMABLE = ("precision",)

_POLL_S = 1.0


def run_commands(plan: Sequence[Command], target: Target, folder: Path) -> list[str]:
    """Run them with ``--save`` into the folder; what files there hold already is not measured again.

    Returns:
        The command lines that failed. What lacks a capability is said and is no failure.
    """
    failed = []
    for number, command in enumerate(plan, 1):
        reason = why_not(command, target)
        if reason is not None:
            say(f"report: {number} of {len(plan)} is left out, it {reason}: {command.line}")
            continue
        say(f"report: {number} of {len(plan)}: {command.line}")
        try:
            code = _run(command, folder)
        except KeyboardInterrupt:
            say(f"report: interrupted in {number} of {len(plan)}; --run goes on from what is in {folder}")
            raise
        if code not in (0, CapabilityError.exit_code):
            say(f"report: that ended with exit code {code}")
            failed.append(command.line)
    return failed


def results_path(command: Command, folder: Path) -> Path:
    """A command's results file, the same in every run."""
    digest = hashlib.sha256(command.line.encode()).hexdigest()[:8]
    return folder / f"{command.arguments[0]}-{digest}.jsonl.gz"


def without_settings(environment: Mapping[str, str], command: str) -> dict[str, str]:
    """The environment in which a command does what its line says: no settings file, no variables of its options."""
    prefix = f"CS336SYS_{command.upper()}_"
    kept = {name: value for name, value in environment.items() if not name.startswith(prefix)}
    # An empty file, so that no pyproject.toml is looked for.
    return kept | {"CS336SYS_CONFIG": os.devnull}


def _run(command: Command, folder: Path) -> int:
    path = results_path(command, folder)
    arguments = [*command.arguments, "--save", str(path), "--output", str(path.with_name(f"{path.name[:-9]}.md"))]
    if command.arguments[0] not in _NOT_RESUMABLE:
        arguments.append("--resume")
    environment = without_settings(os.environ, command.arguments[0])
    program = Guarded(python_module("cs336sys", *arguments), stdout=2, env=environment)
    try:
        while not program.has_ended(_POLL_S):
            pass
    finally:
        # Ctrl-C has reached this process alone. Every cell that was measured is in the file.
        program.kill()
    return program.process.returncode
