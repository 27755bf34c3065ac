"""What small captures give, field by field, written down in ``figures.txt`` (tests/written_figures.py).

A capture is written as its events: ``kernel NAME LAUNCHED START STOP`` (``-`` without a launch), ``copy`` likewise, and
``call``, ``range``, ``op`` and ``module`` as ``NAME START STOP``, in ns; then ``name=value``. ``join=N`` makes a kernel
the N-th all-reduce of two ranks, ``raw={...}`` is an event as it stands in the file.
"""

# Further names are used in figures.txt.
# ruff: noqa: F401

import functools
import gzip
import json
import os
import shlex
from array import array
from dataclasses import fields, replace
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
from profile_files import NsysReport
from written_figures import figures_test, outcome

from cs336sys.accounting.hardware import Ceilings
from cs336sys.capture import capture as captures
from cs336sys.capture import chrome_trace, integrity, intervals, nsys, operators, range_names, ranks, reading
from cs336sys.capture import difference as differences
from cs336sys.capture import timeline as timelines
from cs336sys.capture.analysis import Analysis, KernelGroup, StepPart
from cs336sys.capture.summary import summarize
from cs336sys.capture.taxonomy import Category, category_of, short_name
from cs336sys.commands.trace.tables import rank_sentence
from cs336sys.errors import CapabilityError, UsageError

# A tenth of a second each.
QUANTILE = functools.cache(ranks._t_quantile)
CATEGORIES = {
    "kernel": "kernel",
    "copy": "gpu_memcpy",
    "call": "cuda_runtime",
    "range": "user_annotation",
    "op": "cpu_op",
    "module": "python_function",
}


def events_of(text):
    """Return the events of a trace as torch.profiler writes them."""
    events, correlation = [], 1000
    for line in text.split("|"):
        if line.strip().startswith("raw="):
            events.append(json.loads(line.strip().removeprefix("raw=")))
            continue
        kind, name, *rest = shlex.split(line)
        given = dict(word.split("=", 1) for word in rest if "=" in word)
        times = [None if word == "-" else int(word) for word in rest if "=" not in word]
        arguments = {key: json.loads(value) for key, value in given.items() if key not in ("thread", "pid", "by")}
        thread, pid = int(given.get("thread", 1)), int(given.get("pid", 100))
        start, stop = times[-2:]
        if kind in ("kernel", "copy"):
            correlation += 1
            arguments = {"correlation": correlation, "stream": 7, "device": 0} | arguments
            if times[0] is not None:
                called = {"correlation": arguments["correlation"]}
                launch = (given.get("by", "cudaLaunchKernel"), times[0], times[0] + 5)
                events.append(event_of("cuda_runtime", *launch, thread, pid, called))
            thread, pid = arguments["stream"], 0
        if "join" in arguments:
            sizes = {"In msg nelems": 250, "Out msg nelems": 200, "dtype": "Float", "Group size": 2}
            group = {"Process Group Name": "0", "Process Group Ranks": "[0, 1]", "Seq": arguments.pop("join")}
            arguments |= {"Collective name": "allreduce", **sizes, **group}
        name = f"nn.Module: {name}" if kind == "module" else name
        events.append(event_of(CATEGORIES[kind], name, start, stop, thread, pid, arguments))
    return events


def event_of(category, name, start, stop, thread, pid, arguments):
    times = {"ts": start / 1e3, "dur": (stop - start) / 1e3}
    return {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": thread, **times, "args": arguments}


def with_files(function, *texts, **document):
    """Return what a function makes of the paths of some captures."""
    with TemporaryDirectory() as folder:
        paths = [Path(folder, f"trace_{number}.json") for number in range(len(texts))]
        for path, text in zip(paths, texts, strict=True):
            # No two files are equal, or they would be copies of one.
            path.write_text(json.dumps(document | {"traceEvents": events_of(text), "traceName": path.name}))
        try:
            return function(paths)
        except UsageError as error:
            raise UsageError(str(error).replace(f"{folder}/", "")) from None


def capture(text, **document):
    return with_files(lambda paths: reading.open_capture(paths[0]), text, **document)


def read(*texts, step=None, **document):
    return with_files(lambda paths: reading.read_captures(paths, step), *texts, **document)


def as_dict(record, *left_out):
    """Return the fields of a record that are not empty."""
    values = {field.name: getattr(record, field.name) for field in fields(record) if field.name not in left_out}
    return {name: value for name, value in values.items() if not hasattr(value, "__len__") or len(value)}


def analysis(text, step=None, **document):
    (of_gpu,) = read(text, step=step, **document).analyses
    return as_dict(of_gpu, "file", "profiler")


def steps_of(text):
    """Return the steps of each GPU, without how they were found."""
    return [as_dict(of_gpu.steps, "definition") for of_gpu in timelines.timelines(capture(text))]


def profile(text, *chosen):
    return as_dict(summarize(capture(text), chosen), "profiler")


def checked(text, **settings):
    """Return what a capture lacks, and the work that is left, with the begin of its launch."""
    of_file = replace(capture(text), **settings)
    of_file = integrity.check_capture(of_file) if settings else of_file
    launches = np.append(of_file.calls.start, -1)[of_file.launch].tolist()
    damage = of_file.damage
    named = [of_file.texts[number] for number in of_file.work.name.tolist()]
    return [
        *damage.sentences,
        *(f"lost {lost}" for lost in damage.lost.tolist()),
        *(f"unlaunched {work}" for work in damage.unlaunched.tolist()),
        f"hides idle time: {damage.hides_idle_time}, times: {damage.hides_times}",
        *zip(named, of_file.work.start.tolist(), launches, strict=True),
    ]


def loaded(content, name="trace.json"):
    """Return what is read of a file's text or bytes."""
    with TemporaryDirectory() as folder:
        path = Path(folder, name)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        of_file = chrome_trace.load_trace(path)
    rows = {name: rows_in(getattr(of_file, name)) for name in ("work", "calls", "ranges", "operations", "modules")}
    return as_dict(replace(of_file, work=(), calls=(), ranges=(), operations=(), modules=())) | rows


def limited(module, function, **limits):
    """Return what a function gives, or the sentence of its refusal, with other limits of a module."""
    with patch.multiple(module, **limits):
        return outcome(function)


def in_folder(names, function):
    """Return what a function makes of the folder of some files, by their names and contents."""
    with TemporaryDirectory() as folder:
        for name, content in names.items():
            Path(folder, name).write_bytes(content)
        try:
            return function(Path(folder))
        except (CapabilityError, UsageError) as error:
            return str(error).replace(folder, "FOLDER")


def of_nsys(function, *names, returncode=0):
    """Return what a function of nsys gives, and what it runs; the program leaves files of these names."""

    def run(folder):
        commands = []

        def program(command):
            commands.append(command)
            for name in names:
                Path(folder, name).write_text("")
            return CompletedProcess(command, returncode, "so\n", "it says.\n")

        with patch.object(nsys, "run_guarded_program", program):
            made = outcome(function, SimpleNamespace(path=Path("nsys"), version="2025.3"), folder)
        return [str(made).replace(str(folder), "FOLDER"), str(commands).replace(str(folder), "FOLDER")]

    return in_folder({}, run)


def missing_ranks(named, worlds, groups=(), is_order=False):
    """Return which ranks have no file, of files that name these numbers of ranks and groups of collectives."""
    records = [captures.CollectiveRecord("all_reduce", group, ranks=ranks) for group, ranks in groups]
    gpus = [
        SimpleNamespace(capture=SimpleNamespace(ranks=world), timeline=SimpleNamespace(collective_records=records))
        for world in worlds
    ]
    notes = (reading._RANKS_BY_ORDER,) if is_order else ()
    return reading._missing_ranks(set(named), reading._world_size(gpus), notes)


# The order of columns in figures.txt, where it is not that of the fields.
COLUMNS = {
    captures.DeviceWork: "start stop process correlation name gpu stream bytes operation collective",
    captures.Calls: "process correlation start stop thread name",
    captures.Operations: "number start stop thread name shape sequence",
}


def rows_in(table):
    columns = COLUMNS.get(type(table), "name start stop process thread").split()
    assert set(columns) == {field.name for field in fields(table)}
    return np.column_stack([getattr(table, column) for column in columns])


def reported(write, function=None):
    """Return what is read of a report of Nsight Systems."""
    with TemporaryDirectory() as folder:
        report = NsysReport(Path(folder, "report.sqlite"))
        write(report)
        of_file = nsys.load_export(report.write())
    rows = {name: rows_in(getattr(of_file, name)) for name in ("work", "calls", "ranges")}
    return {"texts": of_file.texts, "unreadable": of_file.unreadable, "gpus": of_file.gpu_names, **rows}


def kernels(**step_ms):
    """Return groups of kernels by their time in each step; ``A_b`` is kernel b of module A."""
    groups = []
    for name, times_ms in step_ms.items():
        module, _, kernel = name.rpartition("_")
        counts = tuple(int(ms > 0) for ms in times_ms)
        groups.append(
            KernelGroup(kernel, "matmul", module, module and "op", "", counts, tuple(times_ms), tuple(times_ms))
        )
    return groups


def side(groups, profiler="torch.profiler", **parts):
    steps = tuple(map(sum, zip(*[group.own_ms for group in groups], *parts.values(), strict=True)))
    named = {name.replace("_", " "): tuple(values) for name, values in parts.items()}
    return Analysis("f", "", profiler, True, "", 0, "", True, steps, named, tuple(groups), (), (), {}, {})


def compared(before, after):
    """Return how two captures differ, change by change."""
    found = differences.compare_captures(before, after)
    rows = {"steps": (found.before_ms, found.after_ms, found.of_kernels, found.delta_ms, found.explained_ms)}
    for change in found.changes:
        sides = [(one.ms, one.count, one.us) for one in (change.before, change.after)]
        rows[change.label] = (change.verdict, *sides, change.low_ms, change.high_ms, change.typical_ms)
    return rows


def of_ranks(local_ms, **settings):
    """Return who is slow, of ranks that compute so long in each step, and the sentence."""
    analyses = [
        replace(side(kernels(gemm=ms), computing=[0.0] * len(ms)), label=f"rank {rank}", parts={"computing": tuple(ms)})
        for rank, ms in enumerate(local_ms)
    ]
    late_ms = tuple(map(tuple, (np.array(local_ms) - np.min(local_ms, axis=0)).tolist()))
    settings = {"late_ms": late_ms, "first_late_ms": late_ms} | settings
    with patch.object(ranks, "_t_quantile", QUANTILE):
        findings = ranks.find_stragglers(analyses, ranks.RankMatching(9, 1.0, (), **settings))
    return (*findings, rank_sentence(len(analyses), findings))


test_figures_are_those_written_down = figures_test(globals())
