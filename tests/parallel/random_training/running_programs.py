"""Sends programs to ranks, and says which fail."""

import json
import math
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import program_ranks
from random_programs import Program, shrunk


def failures(
    ranks: Callable[[int], Any],
    programs: Sequence[Program],
    counts: Counter | None = None,
    run_programs: Callable[..., None] = program_ranks.run_programs,
) -> dict[Program, str]:
    """What went wrong on the first rank that says so, by program.

    Args:
        ranks: ``ranks(world_size)`` are ranks that are alive.
        counts: gets how many actions were done and refused.
        run_programs: what ranks run.
    """
    failed: dict[Program, str] = {}
    counts = Counter() if counts is None else counts
    with tempfile.TemporaryDirectory() as folder:
        folders = {program: f"{folder}/{number}" for number, program in enumerate(programs)}
        leg, going_on = 0, list(folders)
        while going_on:
            for world_size in sorted({program.legs()[leg].world_size for program in going_on}):
                here = [program for program in going_on if program.legs()[leg].world_size == world_size]
                jobs = [(program, leg, folders[program]) for program in here]
                failed |= _failures(ranks, world_size, jobs, f"{folder}/results-of-rank-", counts, run_programs)
            leg += 1
            going_on = [
                program
                for program in going_on
                if program not in failed and Path(folders[program], f"leg{leg}", "process").exists()
            ]
    return failed


def _failures(
    ranks: Callable[[int], Any],
    world_size: int,
    jobs: list[tuple[Program, int, str]],
    results: str,
    counts: Counter,
    run_programs: Callable[..., None],
) -> dict[Program, str]:
    failed = {}
    while jobs:
        crash = None
        for rank in range(world_size):
            Path(f"{results}{rank}").write_text("")
        try:
            ranks(world_size).run(run_programs, jobs, results)
        except Exception as error:
            crash = f"crash: {str(error)[:1500]}"
        of_ranks = [_lines(Path(f"{results}{rank}")) for rank in range(world_size)]
        done = min(map(len, of_ranks))
        for (program, _, _), of_program in zip(jobs, zip(*of_ranks, strict=False), strict=False):
            wrong = [f"rank {rank} of {world_size}: {text}" for rank, (text, _) in enumerate(of_program) if text]
            counts.update(of_program[0][1])
            if wrong:
                failed[program] = min(wrong, key=lambda text: ("wrong on another rank" in text, text))
        if crash is not None:
            failed[jobs[done][0] if done < len(jobs) else jobs[-1][0]] = crash
            # What it came to is known of those before; the others are yet to be run.
            done += 1
        jobs = jobs[done:]
    return failed


def _lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("]")]


def report(ranks: Callable[[int], Any], program: Program, text: str, deadline: float = math.inf) -> str:
    """A smaller program that fails in the same way, as a literal, and what went wrong in it.

    Args:
        deadline: of ``time.monotonic()``, after which it is not made smaller.
    """
    kind = _kind(text)

    def fails(smaller: Program) -> bool:
        nonlocal text
        if time.monotonic() > deadline:
            return False
        found = failures(ranks, [smaller]).get(smaller)
        if found is None or _kind(found) != kind:
            return False
        text = found
        return True

    program = shrunk(program, fails)
    return f"{program!r}\n    {text}"


def _kind(text: str) -> str:
    kinds = (
        "crash",
        "disagree",
        "refused:",
        "returned",
        "one process raises",
        "Error: ",
        "weight",
        "gradient",
        "buffer",
    )
    return next((kind for kind in kinds if kind in text), "state")
