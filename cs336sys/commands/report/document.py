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
        measuring_lines: without any answer, the command lines that would measure it.
    """

    letter: str
    answers: Sequence[Answer]
    measuring_lines: Sequence[str] = ()


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
        answered = [section for section in sections if section.answers]
        # Where one machine has measured everything, no answer lacks anything.
        partly = sum(all(answer.missing for answer in section.answers) for section in answered)
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
    """Answer a part from the cells of each machine, and add a sentence to ``faults`` where cells cannot be read."""
    lines = [command.line for command in part.commands(target)]
    # The handout's own command measures what is missing, whatever the target has; 8 GPUs are enough for all of them.
    full_target = replace(target, size=None, gpus=max(target.gpus, 8))
    lines_of_missing = [command.line for command in part.commands(full_target)]
    answers: list[Answer] = []
    for evidence in evidences:
        answer = Answer(evidence, target.handout)
        try:
            part.answer(answer)
        except FAULTS as error:
            name = f"{problem.name} ({part.letter})" if part.letter else problem.name
            advice = f"; measure again: {lines[0]}" if lines else ""
            faults.append(f"{name}: the cells of {evidence.machine} {fault_words(error)}{advice}")
            continue
        if answer.sentences or answer.tables:
            answers.append(_finished(answer, lines, lines_of_missing))
    # Arithmetic is the same on all machines, and each answer with measurements has it, too.
    answers = [answer for answer in answers if answer.machine] or answers[:1]
    # Nothing is missing that any machine has measured.
    if any(not answer.missing for answer in answers):
        answers = [replace(answer, missing=[]) for answer in answers]
    return Section(part.letter, answers, [] if answers else lines)


def _caption(name: str) -> str:
    """Caption a picture by its name, which ends in a number where several have the same: ``flash, 2``."""
    kind, comma, number = name.partition(", ")
    return _CAPTIONS.get(kind, f"memory over one step, by what holds it: {kind}") + comma + number


def _finished(answer: Answer, lines: Sequence[str], lines_of_missing: Sequence[str]) -> Answer:
    """Add machine, captions, commands (the part's ``lines`` if no run is known), and what measures what is missing."""
    # An item with backticks has the command that measures it in its own text.
    missing = [f"Not measured: {item}." for item in answer.missing if "`" in item]
    if items := [item for item in answer.missing if "`" not in item]:
        commands = ", ".join(f"`{line}`" for line in lines_of_missing)
        missing.append(f"Not measured: {'; '.join(items)}." + f" Measure it with {commands}." * bool(commands))
    runs = answer.runs.values()
    return replace(
        answer,
        machine="; ".join([answer.evidence.machine, *environment_words(runs)]) if runs else "",
        commands=list(dict.fromkeys(map(typed_command, runs))) or list(lines),
        tables=_with_notes_once(answer.tables),
        pictures={_caption(name): draw for name, draw in answer.pictures.items()},
        missing=missing,
    )


# Commands whose ranks communicate, how the names of variables that change this begin, and what turns multicast off.
_WITH_RANKS = ("allreduce", "ddp", "shard", "verify")
_PREFIXES = ("NCCL_", "TORCH_NCCL_", "TORCH_SYMM_", "GLOO_")
_NO_MULTICAST = {"NCCL_NVLS_ENABLE=0", "TORCH_SYMM_MEM_DISABLE_MULTICAST=1"}


def environment_words(runs: Iterable[Run]) -> list[str]:
    """Name the variables under which ranks communicated, in one clause or none; ranks of a CPU have Gloo's alone."""
    of_ranks = [run for run in runs if run.arguments and run.arguments[0] in _WITH_RANKS]
    prefixes = _PREFIXES if any(run.machine.get("gpu") for run in of_ranks) else "GLOO_"
    variables = {item for run in of_ranks for item in run.environment.items() if item[0].startswith(prefixes)}
    # NCCL_VERSION, of NVIDIA's container images, changes nothing.
    names = sorted(f"{name}={value}" for name, value in variables if not name.endswith("_VERSION"))
    multicast = ", which turns NVLink multicast off" if _NO_MULTICAST & {*names} else ""
    return [f"with {', '.join(names)}{multicast}"] if names else []


def _with_notes_once(tables: Sequence[Table]) -> list[Table]:
    """Keep each note only under the last table that has it."""
    last_table = {note: index for index, table in enumerate(tables) for note in table.notes}
    return [
        replace(table, notes=[note for note in table.notes if last_table[note] == index])
        for index, table in enumerate(tables)
    ]


def typed_command(run: Run) -> str:
    """Return the command line as it was typed, without the options that say where results went."""
    kept = ["cs336sys"]
    arguments = iter(run.arguments)
    for argument in arguments:
        if argument in _FILE_OPTIONS:
            next(arguments, None)  # "--save", "FILE"; below is "--save=FILE"
        elif argument.partition("=")[0] not in (*_FILE_OPTIONS, *_FILE_FLAGS):
            kept.append(argument)
    return shlex.join(kept)
