"""The write-up as data: sections in the handout's order, with what each part of a problem shows."""

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from cs336sys.commands.registry import FAULTS, fault_words
from cs336sys.commands.report.answer import Answer
from cs336sys.commands.report.evidence import Evidence
from cs336sys.commands.report.problem import Part, Problem, Target
from cs336sys.results.model import Run
from cs336sys.tables.table import Table

# Options of a command line that say where results went, and not what was measured: with a value, and without.
_FILE_OPTIONS = ("--save", "--output", "-o", "--format", "--plot", "--plot-buckets", "--snapshot", "--trace")
_FILE_FLAGS = ("--resume", "--resume-any")

# What pictures show, by the names that commands give them; memprof names each by its workload.
_CAPTIONS = {
    "allreduce": "time and bus bandwidth over the size, and over the number of ranks",
    "attn": "time and memory of attention over the context",
    "buckets": "overhead over the size of buckets, measured and by the equation",
    "flash": "throughput over the context",
    "memory": "what the rank that holds most holds at each moment",
    "shares": "share of each kind of kernel in the kernel time of each phase",
    "timelines": "when rank 0 computes and when it communicates in one step",
}


@dataclass(frozen=True)
class Section:
    """One part of a problem, with each machine's answer.

    Attributes:
        absent: the command lines that would give what no file has.
    """

    letter: str
    blocks: Sequence[Answer]
    absent: Sequence[str] = ()


@dataclass(frozen=True)
class Document:
    """All problems, each with its sections; ``faults``: cells that could not be shown, a sentence each."""

    year: int
    machines: Sequence[str]
    problems: list[tuple[Problem, Sequence[Section]]]
    faults: list[str] = field(default_factory=list)

    @property
    def title(self) -> str:
        return f"CS336 Assignment 2: Systems, {self.year}"

    @property
    def count_words(self) -> str:
        """Say how many parts are answered: ``45 of 45 parts answered, 2 of them in part``."""
        sections = [section for _, of_problem in self.problems for section in of_problem]
        answered = [section for section in sections if section.blocks]
        # Where one machine has measured everything, none lacks anything.
        partly = sum(all(block.missing for block in section.blocks) for section in answered)
        return f"{len(answered)} of {len(sections)} parts answered" + (f", {partly} of them in part" if partly else "")


def build_document(
    problems: Sequence[Problem], evidences: Sequence[Evidence], target: Target, faults: Sequence[str] = ()
) -> Document:
    """Answer every part from the cells of each machine; those of two machines are never put together."""
    machines = [evidence.machine for evidence in evidences if evidence.machine]
    document = Document(target.handout.year, machines, [], list(faults))
    for problem in problems:
        sections = [_section(problem, part, evidences, target, document.faults) for part in problem.parts]
        document.problems.append((problem, sections))
    return document


def _section(problem: Problem, part: Part, evidences: Sequence[Evidence], target: Target, faults: list[str]) -> Section:
    lines = [command.line for command in part.commands(target)]
    # What the handout asks and is missing comes from no command of the one size that is asked for in its place, and may
    # want more GPUs than there are here.
    handouts_own = [command.line for command in part.commands(replace(target, size=None, gpus=max(target.gpus, 8)))]
    blocks: list[Answer] = []
    for evidence in evidences:
        answer = Answer(evidence, target.handout)
        try:
            part.answer(answer)
        except FAULTS as error:
            name = f"{problem.name} ({part.letter})" if part.letter else problem.name
            fault = f"the cells of {evidence.machine} {fault_words(error)}"
            faults.append("; ".join([f"{name}: {fault}", *(f"measure again: {line}" for line in lines[:1])]))
            continue
        if answer.sentences or answer.tables:
            blocks.append(_finished(answer, lines, handouts_own))
    # A machine that measured nothing adds nothing to another's answer, and the same words are said once.
    blocks = [block for block in blocks if block.machine] or blocks[:1]
    # What one machine lacks another has measured.
    if any(not block.missing for block in blocks):
        blocks = [replace(block, missing=[]) for block in blocks]
    return Section(part.letter, blocks, [] if blocks else lines)


def _caption(name: str) -> str:
    """Caption a picture; those of several invocations are numbered in the order of their commands."""
    kind, _, number = name.partition(", ")
    shown = _CAPTIONS.get(kind, f"memory over one step, by what holds it: {kind}")
    return f"{shown}, {number}" if number else shown


def _finished(answer: Answer, lines: Sequence[str], sources: Sequence[str]) -> Answer:
    """An answer with its machine and captions, and with the commands in ``sources`` that give what it lacks."""
    # Some say themselves what would give them.
    missing = [f"Not measured: {item}." for item in answer.missing if "`" in item]
    if plain := [item for item in answer.missing if "`" not in item]:
        source = f" Measure it with {', '.join(f'`{line}`' for line in sources)}." if sources else ""
        missing.append(f"Not measured: {'; '.join(plain)}.{source}")
    runs = answer.runs.values()
    return replace(
        answer,
        machine="; ".join([answer.evidence.machine, *environment_words(runs)]) if runs else "",
        commands=list(dict.fromkeys(map(typed_command, runs))) or list(lines),
        tables=_saying_once(answer.tables),
        pictures={_caption(name): draw for name, draw in answer.pictures.items()},
        missing=missing,
    )


# Commands whose ranks communicate, and the variables that change how.
_WITH_RANKS = ("allreduce", "ddp", "shard", "verify")
_PREFIXES = ("NCCL_", "TORCH_NCCL_", "TORCH_SYMM_", "GLOO_")
_NO_MULTICAST = {"NCCL_NVLS_ENABLE=0", "TORCH_SYMM_MEM_DISABLE_MULTICAST=1"}


def environment_words(runs: Iterable[Run]) -> list[str]:
    """Name the variables under which ranks communicated, one sentence, or none; ranks of a CPU have Gloo alone."""
    of_ranks = [run for run in runs if run.arguments and run.arguments[0] in _WITH_RANKS]
    prefixes = _PREFIXES if any(run.machine.get("gpu") for run in of_ranks) else "GLOO_"
    variables = {item for run in of_ranks for item in run.environment.items() if item[0].startswith(prefixes)}
    names = sorted(f"{name}={value}" for name, value in variables if not name.endswith("_VERSION"))
    multicast = ", which turns NVLink multicast off" if _NO_MULTICAST & {*names} else ""
    return [f"with {', '.join(names)}{multicast}"] if names else []


def _saying_once(tables: Sequence[Table]) -> list[Table]:
    """The tables of several runs, each note under the last table that has it."""
    printed: set[str] = set()
    kept = []
    for table in reversed(tables):
        kept.append(replace(table, notes=[note for note in table.notes if note not in printed]))
        printed |= set(table.notes)
    return kept[::-1]


def typed_command(run: Run) -> str:
    """Return what was typed, without where its results went."""
    kept = ["cs336sys"]
    arguments = iter(run.arguments)
    for argument in arguments:
        if argument in _FILE_OPTIONS:
            next(arguments, None)
        elif argument.partition("=")[0] not in (*_FILE_OPTIONS, *_FILE_FLAGS):
            kept.append(argument)
    return shlex.join(kept)
