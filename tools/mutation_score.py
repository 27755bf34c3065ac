"""Measure what the tests find: plant one small fault at a time in the package, and run the tests that reach its line.

    python tools/mutation_score.py --out build/mutants --workers 14 --minutes 8    # at random, while time allows
    python tools/mutation_score.py --out build/mutants --room results              # all that --out lacks, of a room
    python tools/mutation_score.py --out build/mutants --survivors                 # these once more, after new tests
    python tools/mutation_score.py --out build/mutants --report                    # the table and the survivors

Each test file first runs twice without a fault: once to see which test reaches which line, and once in reverse order
for the times; tests that fail then are left out. Each fault is planted in a copy of the checkout (mutants.py), where
the tests that reach its statement run, the quickest first, in a process forked from this one, which has torch imported
(forked_tests.py). A fault that is found in time or makes tests hang is found; one that no test reaches survives.
"""

import argparse
import contextlib
import difflib
import fcntl
import functools
import hashlib
import importlib
import json
import math
import mmap
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from mutants import Mutant, apply, mutants_of

# What tests/conftest.py sets before kernels are imported, and no GPU, which does not survive a fork.
os.environ.update(TRITON_INTERPRET="1", TORCHINDUCTOR_COMPILE_THREADS="1", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")

from forked_tests import FAULTY_RUNNER, ForkedTests, Room

ROOMS = {
    "parallel": Room(("cs336sys/parallel",), ("tests/parallel",), forks=True),
    "parity": Room(
        ("cs336sys/parity",), ("tests/parity", "tests/commands/rank_training", "tests/commands/verify"), forks=True
    ),
    "capture": Room(("cs336sys/capture",), ("tests/capture",)),
    "accounting": Room(("cs336sys/accounting",), ("tests/accounting",)),
    "results": Room(("cs336sys/results",), ("tests/results",)),
}
# Imported once; nothing of the package, which each process imports with its fault.
PRELOADED = ("torch", "numpy", "hypothesis", "torch._inductor.compile_fx", "scipy.stats")
# Any step of a test may take this times as long as the slowest without a fault, and at least so long.
LIMIT_FACTOR, LEAST_LIMIT_S = 4, 15
FILE_S = 0.2
FILE_LIMIT_S = 900
# Tests that share fixtures slower than this stay together, so that these are set up once.
SLOW_FIXTURE_S = 0.1
# By the exit code of pytest, which is 5 where no test was collected.
OUTCOMES = {None: "timeout", 0: "survived", 5: "survived", FAULTY_RUNNER: "faulty runner"}
FOUND, SURVIVED = ("found", "timeout"), ("survived", "unreached")


@dataclass(frozen=True)
class Test:
    """A test without a fault: its time, that of the fixtures it shares, and the lines it reaches, by source."""

    name: str
    file: str
    seconds: float
    fixtures_s: float
    startup_s: float
    lines: dict[str, set[int]]
    imported: frozenset[str]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file; the last line may be cut."""
    records = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records


def append_line(path: Path, record: dict[str, Any]) -> None:
    with path.open("ab", buffering=0) as file:
        file.write(json.dumps(record).encode() + b"\n")


@functools.cache
def digest(*files: Path) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


class Coverage:
    """What each test file takes and reaches: a record a file and kind, for the code as it is now."""

    def __init__(self, root: Path, path: Path):
        self.root, self.path = root, path
        self.test_files = {
            name: [
                str(file.relative_to(root))
                for folder in room.tests
                for file in sorted((root / folder).rglob("test_*.py"))
            ]
            for name, room in ROOMS.items()
        }
        # What all tests may use: the package, and modules and texts next to tests.
        folders = {Path(name).parts[0] for room in ROOMS.values() for name in room.sources + room.tests}
        files = [file for folder in sorted(folders) for file in sorted((root / folder).rglob("*.py"))]
        self.shared = [file for file in files if not file.name.startswith("test_")]
        self.shared += sorted((root / "tests").rglob("*.txt"))

    def identify(self, room: str, kind: str, file: str) -> dict[str, str]:
        return {"room": room, "kind": kind, "file": file, "code": digest(*self.shared, self.root / file)}

    def records(self) -> dict[tuple[str, ...], dict[str, Any]]:
        keys = ("room", "kind", "file", "code")
        return {tuple(record[key] for key in keys): record for record in read_lines(self.path)}

    def tests_of(self, room: str) -> list[Test]:
        """Return the tests of a room that pass in any order."""
        records, tests = self.records(), []
        for file in self.test_files[room]:
            times, lines = (records[tuple(self.identify(room, kind, file).values())] for kind in ("time", "trace"))
            sources = frozenset(
                source for reached in [lines["imported"], *lines["tests"].values()] for source in reached
            )
            for name in times["tests"].keys() & lines["tests"].keys() - set(times["failed"]):
                reached = {source: set(numbers) for source, numbers in lines["tests"][name].items()}
                tests.append(Test(name, file, *times["tests"][name], times["startup_s"], reached, sources))
        return tests


def choose_tests(mutant: Mutant, tests: list[Test], most_s: float) -> tuple[list[Test], int]:
    """Return the tests that may find a fault, the quickest first, and how many more there is no time for.

    A fault that runs at import concerns all tests of a file that imports it: those that reach its module come first.
    """
    first, last = mutant.statement_lines
    statement = set(range(first, last + 1))
    chosen = []
    for test in tests:
        lines = test.lines.get(mutant.path, set())
        if lines & statement or (mutant.at_import and mutant.path in test.imported):
            together = test.file if test.fixtures_s > SLOW_FIXTURE_S else ""
            chosen.append((not lines, bool(together), test.fixtures_s * bool(together), together, test.seconds, test))
    chosen = [item[-1] for item in sorted(chosen, key=lambda item: item[:-1])]
    sum_s = 0.0
    for number, test in enumerate(chosen):
        sum_s += test.seconds
        if sum_s > most_s and number:
            return chosen[:number], len(chosen) - number
    return chosen, 0


def try_mutant(forked: ForkedTests, room: Room, mutant: Mutant, tests: list[Test], arguments) -> dict[str, Any] | None:
    """Return what became of a fault, or None if there was no time."""
    changed = apply(mutant, (forked.tree / mutant.path).read_bytes())
    if changed is None:
        return {"outcome": "not applicable"}
    chosen, left_out = choose_tests(mutant, tests, arguments.most_seconds)
    if not chosen:
        return {"outcome": "unreached"}
    order = {test.name: position for position, test in enumerate(chosen)}
    files = sorted({test.file for test in chosen})
    # Files are collected together, and most of what takes time is imported once.
    startup_s = max(test.startup_s for test in chosen) + FILE_S * len(files)
    slowest_s = max(startup_s, *(test.seconds + test.fixtures_s for test in chosen))
    with forked.planted(mutant.path, changed):
        code, events = forked.run(
            room,
            files,
            lambda items: sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid]),
            arguments.end_s - time.monotonic(),
            quiet_limit_s=max(LEAST_LIMIT_S, LIMIT_FACTOR * slowest_s),
            options=() if arguments.every_test else ("-x",),
        )
    if code is None and time.monotonic() >= arguments.end_s:
        return None
    outcome = OUTCOMES.get(code, "found")
    failed = list(dict.fromkeys(event["ran"] for event in events if event.get("failed")))
    ran = sum("test" in event for event in events)
    return {"outcome": outcome, "code": code, "failed": failed, "ran": ran, "left_out": left_out}


class Jobs:
    """Jobs that processes share: each takes the next whose room is covered, and marks it as done.

    A job is a room, a kind ("time", "trace" or "mutant") and its subject; those that cover rooms come first.
    """

    NEW, TAKEN, DONE = b"\0", b"\1", b"\2"

    def __init__(self, coverage_jobs: list[tuple], mutant_jobs: list[tuple], lock: Path):
        self.jobs, self.coverage_jobs, self.lock = coverage_jobs + mutant_jobs, coverage_jobs, lock
        self.states = mmap.mmap(-1, len(self.jobs) + 1)
        lock.touch()

    def take(self) -> int | None:
        """Return the number of a job, -1 where none can be done yet, and None where all are taken."""
        with self.lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            states = self.states[: len(self.jobs)]
            uncovered = {
                job[0] for job, state in zip(self.coverage_jobs, states, strict=False) if bytes([state]) != self.DONE
            }
            number = states.find(self.NEW)
            while number >= len(self.coverage_jobs) and self.jobs[number][0] in uncovered:
                number = states.find(self.NEW, number + 1)
            if number >= 0:
                self.states[number : number + 1] = self.TAKEN
                return number
            return -1 if self.NEW in states else None

    def finish(self, number: int) -> None:
        self.states[number : number + 1] = self.DONE


def do_jobs(jobs: Jobs, coverage: Coverage, folder: Path, arguments: argparse.Namespace) -> None:
    """Do jobs until there are none or the time is over."""
    forked, tests = ForkedTests(arguments.root, folder), {}
    while time.monotonic() < arguments.end_s and (number := jobs.take()) is not None:
        if number < 0:
            time.sleep(0.2)
            continue
        room, kind, subject = jobs.jobs[number]
        begin_s = time.monotonic()
        if kind == "mutant":
            if room not in tests:
                tests[room] = coverage.tests_of(room)
            path, key = arguments.out / "mutants.jsonl", {"room": room} | identify(subject, arguments.root)
            record = try_mutant(forked, ROOMS[room], subject, tests[room], arguments)
        else:
            path, key = coverage.path, coverage.identify(room, kind, subject)
            run = forked.time_tests if kind == "time" else forked.trace_tests
            record = run(ROOMS[room], subject, min(FILE_LIMIT_S, arguments.end_s - begin_s))
            if time.monotonic() >= arguments.end_s:
                return
            if "problem" in record:
                print(f"{subject}: faults that it would find count as survived: {record['problem']}", file=sys.stderr)
        if record is not None:
            append_line(path, key | record | {"seconds": round(time.monotonic() - begin_s, 2)})
            jobs.finish(number)


def identify(mutant: Mutant, root: Path) -> dict[str, str]:
    return {"mutant": mutant.name, "source": digest(root / mutant.path)}


def find_mutants(arguments: argparse.Namespace) -> dict[str, list[Mutant]]:
    """Return the faults by room, in the random order of the seed: the first ones are the sample."""
    mutants = {}
    for room in arguments.room:
        folders = [arguments.root / folder for folder in ROOMS[room].sources]
        paths = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
        found = [
            mutant for path in paths for mutant in mutants_of(str(path.relative_to(arguments.root)), path.read_bytes())
        ]
        random.Random(f"{arguments.seed} {room}").shuffle(found)
        mutants[room] = [mutant for mutant in found if arguments.only in mutant.name]
        mutants[room] = mutants[room][: math.ceil(arguments.share * len(mutants[room]))]
    return mutants


def outcomes(mutants: dict[str, list[Mutant]], arguments: argparse.Namespace) -> dict[str, list[tuple[Mutant, dict]]]:
    """Return by room the faults that were tried in the sources as they are, with their last records."""
    records = {(record["mutant"], record["source"]): record for record in read_lines(arguments.out / "mutants.jsonl")}
    tried = {}
    for room, every in mutants.items():
        keys = {mutant: tuple(identify(mutant, arguments.root).values()) for mutant in every}
        tried[room] = [(mutant, records[key]) for mutant, key in keys.items() if key in records]
    return tried


def run(arguments: argparse.Namespace) -> None:
    """Cover what is not, and try what was not tried, in processes of their own."""
    mutants = find_mutants(arguments)
    tried = outcomes(mutants, arguments)
    done = {
        mutant
        for results in tried.values()
        for mutant, record in results
        if not (arguments.survivors and record["outcome"] in SURVIVED)
    }
    todo = [mutant for every in mutants.values() for mutant in every]
    if arguments.survivors:
        todo = [mutant for results in tried.values() for mutant, _ in results]
    rooms = {mutant: room for room, every in mutants.items() for mutant in every}
    position = {mutant: place for every in mutants.values() for place, mutant in enumerate(every)}
    # The rooms in turn, so that what is not done in time lacks of each.
    todo = sorted((mutant for mutant in todo if mutant not in done), key=lambda mutant: position[mutant])
    coverage = Coverage(arguments.root, arguments.out / "coverage.jsonl")
    covered = {key for key, record in coverage.records().items() if "problem" not in record}
    needed = [
        (room, kind, file) for room in mutants for file in coverage.test_files[room] for kind in ("trace", "time")
    ]
    jobs = Jobs(
        [job for job in needed if tuple(coverage.identify(*job).values()) not in covered],
        [(rooms[mutant], "mutant", mutant) for mutant in todo],
        arguments.out / "lock",
    )
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    # No TemporaryDirectory: a rank that ends would remove it, since it was forked from this process.
    folder, workers = Path(tempfile.mkdtemp(prefix="mutants")), []
    try:
        for number in range(arguments.workers):
            process_id = os.fork()
            if process_id == 0:
                run_worker(jobs, coverage, folder / str(number), arguments)
            workers.append(process_id)
        while workers:
            workers.remove(os.wait()[0])
    finally:
        for process_id in workers:
            os.kill(process_id, signal.SIGTERM)
        for process_id in workers:
            os.waitpid(process_id, 0)
        shutil.rmtree(folder)


def run_worker(jobs: Jobs, coverage: Coverage, folder: Path, arguments: argparse.Namespace) -> NoReturn:
    code = 1
    try:
        do_jobs(jobs, coverage, folder, arguments)
        code = 0
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(code)


def report(arguments: argparse.Namespace) -> None:
    """Print a table of the rooms, and the faults that survived."""
    mutants = find_mutants(arguments)
    tried = outcomes(mutants, arguments)
    columns = ("room", "faults", "tried", "found", "timeout", "survived", "unreached", "not applicable", "score")
    rows = [columns]
    for room, results in tried.items():
        counts = Counter(record["outcome"] for _, record in results)
        found, survived = (sum(counts[name] for name in names) for names in (FOUND, SURVIVED))
        score = f"{found / (found + survived):.1%}" if found + survived else "-"
        rows.append((room, len(mutants[room]), len(results), *(counts[name] for name in columns[3:-1]), score))
        if counts["faulty runner"]:
            print(f"{room}: {counts['faulty runner']} faults could not be tried, by a fault of this program")
    for row in rows:
        print("".join(f"{cell!s:>16}" if place else f"{cell!s:<12}" for place, cell in enumerate(row)))
    for results in tried.values():
        for mutant, record in results:
            if record["outcome"] in SURVIVED:
                lacking = f", {record['left_out']} tests for which there was no time" if record.get("left_out") else ""
                print(f"\n{mutant.name}: {record['outcome']}, {record.get('ran', 0)} tests ran{lacking}")
                print(show(mutant, (arguments.root / mutant.path).read_bytes()))


def show(mutant: Mutant, source: bytes) -> str:
    """Return the lines that a fault changes, before and after."""
    before, after = (text.decode().splitlines() for text in (source, apply(mutant, source) or source))
    lines = difflib.unified_diff(before, after, lineterm="", n=0)
    return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--out", type=Path, required=True, help="the folder of the results, which a later run completes"
    )
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="the checkout")
    parser.add_argument("--room", action="append", choices=list(ROOMS), help="may be repeated; all by default")
    parser.add_argument("--share", type=float, default=1.0, help="of the faults of each room, at random")
    parser.add_argument("--only", default="", help="faults whose name (path:line:column operator) has this in it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which no results are awaited")
    parser.add_argument("--most-seconds", type=float, default=math.inf, help="of tests for a fault, the quickest first")
    parser.add_argument("--every-test", action="store_true", help="record every test that finds a fault, not the first")
    parser.add_argument("--survivors", action="store_true", help="try these of --out once more")
    parser.add_argument("--report", action="store_true", help="run nothing")
    arguments = parser.parse_args()
    # Else whoever ends this process would leave its tests running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    arguments.end_s = time.monotonic() + 60 * arguments.minutes
    arguments.out.mkdir(parents=True, exist_ok=True)
    arguments.root, arguments.out = arguments.root.resolve(), arguments.out.resolve()
    arguments.room = arguments.room or list(ROOMS)
    if not arguments.report:
        run(arguments)
    report(arguments)


if __name__ == "__main__":
    main()
