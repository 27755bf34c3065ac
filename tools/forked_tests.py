"""Run tests in a copy of the checkout, in processes forked from this one, and record what each takes and reaches."""

import contextlib
import itertools
import json
import math
import multiprocessing.forkserver
import multiprocessing.util
import os
import resource
import shutil
import signal
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from ctypes import CDLL
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from reached_lines import ReachedLines

NOT_COPIED = (".git", ".venv", "build", "*.egg-info", ".mypy_cache", ".ruff_cache", ".hypothesis")
# Of address space, for each process of the tests; what is mapped before is not counted.
MEMORY_BYTES = 16 << 30
# The exit code of a process whose fault is not the tests'.
FAULTY_RUNNER = 70
PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Room:
    """Folders of the package and the tests that decide about them; ``forks``: these start ranks by a fork server."""

    sources: tuple[str, ...]
    tests: tuple[str, ...]
    forks: bool = False


class Recorder:
    """A pytest plugin that chooses tests and appends what happens to a file, since its process may be killed."""

    def __init__(self, events: Path, choose: Callable[[list], list], reached: ReachedLines | None):
        self.events, self.choose, self.reached = events, choose, reached
        self.contexts, self.shared_fixtures = {}, set()
        self.begin_s = time.monotonic()

    def write(self, **event) -> None:
        with self.events.open("a") as file:
            file.write(json.dumps(event) + "\n")

    def switch(self, context: str) -> int:
        """Attribute lines to a test or a fixture; return the number of the context before."""
        number = self.contexts.setdefault(context, len(self.contexts) + 1)
        return self.reached.switch(number) if self.reached else 0

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        items[:] = self.choose(items)
        self.write(startup_s=time.monotonic() - self.begin_s)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self.switch(item.nodeid)
        result = yield
        fixtures = [name for name in item.fixturenames if name in self.shared_fixtures]
        self.write(test=item.nodeid, context=self.contexts[item.nodeid], fixtures=fixtures)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef):
        if fixturedef.scope == "function":
            return (yield)
        name, begin_s = fixturedef.argname, time.monotonic()
        before = self.switch(name)
        try:
            return (yield)
        finally:
            if self.reached:
                self.reached.switch(before)
            self.shared_fixtures.add(name)
            self.write(fixture=name, context=self.contexts[name], seconds=time.monotonic() - begin_s)

    def pytest_runtest_logreport(self, report):
        self.write(ran=report.nodeid, seconds=report.duration, failed=report.failed)


class ForkedTests:
    """A copy of a checkout, and the processes that run its tests, one at a time."""

    def __init__(self, root: Path, folder: Path):
        self.tree, self.events, self.serial = folder / "tree", folder / "events", itertools.count(1)
        shutil.copytree(root, self.tree, ignore=shutil.ignore_patterns(*NOT_COPIED), symlinks=True)
        # Processes whose parents have ended become children of this one, which ends them.
        CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    @contextlib.contextmanager
    def planted(self, path: str, source: bytes):
        """Within this, a file of the copy has another content."""
        file = self.tree / path
        before, status = file.read_bytes(), file.stat()
        try:
            file.write_bytes(source)
            # Python would take what it compiled in the same second from as many bytes for this.
            second = next(self.serial)
            os.utime(file, (second, second))
            yield
        finally:
            file.write_bytes(before)
            os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))

    def run(
        self,
        room: Room,
        files: Sequence[str],
        choose: Callable[[list], list],
        limit_s: float,
        *,
        quiet_limit_s: float = math.inf,
        options: Sequence[str] = (),
        reached: ReachedLines | None = None,
    ) -> tuple[int | None, list[dict[str, Any]]]:
        """Run tests of some files.

        Args:
            limit_s: of all.
            quiet_limit_s: of a test's setup, call or teardown.

        Returns:
            the exit code of pytest, or None after a limit, and what happened.
        """
        self.events.write_text("")
        process_id = os.fork()
        if process_id == 0:
            code = FAULTY_RUNNER
            try:
                code = self._run_in_child(room, [*files, *options], Recorder(self.events, choose, reached))
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        try:
            code = self._wait(process_id, limit_s, quiet_limit_s)
        finally:
            end_children()
        return code, [json.loads(line) for line in self.events.read_text().splitlines()]

    def _wait(self, process_id: int, limit_s: float, quiet_limit_s: float) -> int | None:
        end_s, size, event_s = time.monotonic() + limit_s, 0, time.monotonic()
        while (now_s := time.monotonic()) < min(end_s, event_s + quiet_limit_s):
            ended, status = os.waitpid(process_id, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            if size != self.events.stat().st_size:
                size, event_s = self.events.stat().st_size, now_s
            time.sleep(0.02)
        return None

    def _run_in_child(self, room: Room, arguments: list[str], recorder: Recorder) -> int:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        memory_bytes = MEMORY_BYTES + int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
        output = os.open(self.tree.with_name("output"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for descriptor, file in ((0, os.open(os.devnull, os.O_RDONLY)), (1, output), (2, output)):
            os.dup2(file, descriptor)
        os.chdir(self.tree)
        sys.path[:0] = [str(self.tree), str(self.tree / "tests")]
        paths = [str(self.tree), os.environ.get("PYTHONPATH", "")]
        if recorder.reached:
            paths.insert(0, recorder.reached.folder_on_path())
            recorder.reached.trace()
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        if room.forks:
            try:
                start_fork_server()
            except Exception:
                # It imports the package, which the fault has broken.
                traceback.print_exc()
                return int(pytest.ExitCode.TESTS_FAILED)
        options = ["-q", "-n", "0", "-p", "no:cacheprovider", f"--basetemp={self.tree.with_name('temporary')}"]
        return int(pytest.main([*arguments, *options], plugins=[recorder]))

    def time_tests(self, room: Room, file: str, limit_s: float) -> dict[str, Any]:
        """Run a file's tests in reverse order; return their seconds, those of shared fixtures, and what failed."""
        code, events = self.run(room, [file], lambda items: items[::-1], limit_s)
        seconds, fixtures, failed, fixture_s = Counter(), Counter(), set(), 0.0
        for event in events:
            if "fixture" in event:
                fixtures[event["fixture"]] += event["seconds"]
                fixture_s += event["seconds"]
            elif "ran" in event:
                # What the fixtures took is part of the first test that uses them.
                seconds[event["ran"]] += max(0, event["seconds"] - fixture_s)
                fixture_s = 0.0
                failed |= {event["ran"]} if event["failed"] else set()
        tests = {
            event["test"]: [seconds[event["test"]], sum(fixtures[name] for name in event["fixtures"])]
            for event in events
            if "test" in event
        }
        return self._problem(code) | {
            "tests": tests,
            "failed": sorted(failed),
            "startup_s": next((event["startup_s"] for event in events if "startup_s" in event), limit_s),
        }

    def trace_tests(self, room: Room, file: str, limit_s: float) -> dict[str, Any]:
        """Run a file's tests; return the lines of the room's sources that each reaches, and those of the import."""
        sources = [path for folder in room.sources for path in sorted((self.tree / folder).rglob("*.py"))]
        reached = ReachedLines.create(self.tree.with_name("lines"), sources)
        code, events = self.run(room, [file], list, limit_s, reached=reached)
        contexts = {event["fixture"]: event["context"] for event in events if "fixture" in event}

        def lines_of(numbers):
            lines = defaultdict(set)
            for number in numbers:
                for source, found in reached.lines_of(number).items():
                    lines[str(Path(source).relative_to(self.tree))].update(found)
            return {source: sorted(found) for source, found in lines.items()}

        tests = {
            event["test"]: lines_of([event["context"], *(contexts[name] for name in event["fixtures"])])
            for event in events
            if "test" in event
        }
        return self._problem(code) | {"imported": lines_of([0]), "tests": tests}

    def _problem(self, code: int | None) -> dict[str, str]:
        """Return why tests could not run, if they could not: without a fault they pass, fail, or are none."""
        if code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
            return {}
        return {"problem": f"exit code {code}: {self.tree.with_name('output').read_text()[-500:]}"}


def end_children() -> None:
    """Kill the children of this process, and those that they leave to it, until there are none."""
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        children = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                # After the name in parentheses, which may contain blanks: state and parent.
                if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == os.getpid():
                    children.append(int(folder.name))
        if not children:
            return
        for process_id in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGKILL)
        time.sleep(0.005)


def start_fork_server() -> None:
    """Fork the server of multiprocessing from this process, which has torch imported, in place of a fresh one."""
    from forked_processes import PRELOADED

    start = multiprocessing.util.spawnv_passfds

    def fork(path, arguments, descriptors):
        if "multiprocessing.forkserver" not in str(arguments[-1]):
            return start(path, arguments, descriptors)
        process_id = os.fork()
        if process_id == 0:
            try:
                exec(os.fsdecode(arguments[-1]), {"__name__": "fork_server"})
            finally:
                os._exit(0)
        return process_id

    multiprocessing.util.spawnv_passfds = fork
    multiprocessing.set_forkserver_preload(PRELOADED)
    multiprocessing.forkserver.ensure_running()
