"""The write-up: sections in the order of the handout as data, and these as Markdown, LaTeX, Typst and HTML."""

import html
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from cs336sys.commands.registry import FAULTS, fault_words
from cs336sys.commands.report.answer import Answer
from cs336sys.commands.report.evidence import Evidence
from cs336sys.commands.report.problem import Part, Problem, Target
from cs336sys.results.foreign import printable
from cs336sys.results.model import Run
from cs336sys.tables.outputs import write_file, writing_stdout
from cs336sys.tables.page import find_browser, html_page, html_picture, html_table, print_page
from cs336sys.tables.render import STDOUT, escape_latex, escape_markdown, render, typst_string
from cs336sys.tables.table import Table, one_line, sentences

# Options of a command line that say where results went, and not what was measured: with a value, and without.
_FILE_OPTIONS = ("--save", "--output", "-o", "--format", "--plot", "--plot-buckets", "--snapshot", "--trace")

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
    """One part of a problem, with each machine's answer."""

    letter: str
    answers: Sequence[Answer]
    measuring_lines: Sequence[str] = ()  # Without any answer, the command lines that would measure it.


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


def _finished(answer: Answer, lines: Sequence[str], lines_of_missing: Sequence[str]) -> Answer:
    """Add machine, captions, commands (the part's ``lines`` if no run is known), and what measures what is missing."""
    # An item with backticks has the command that measures it in its own text.
    missing = [f"Not measured: {item}." for item in answer.missing if "`" in item]
    if items := [item for item in answer.missing if "`" not in item]:
        commands = ", ".join(f"`{line}`" for line in lines_of_missing)
        missing.append(f"Not measured: {'; '.join(items)}." + f" Measure it with {commands}." * bool(commands))
    runs = answer.runs.values()
    # Each note stands only under the last table that has it.
    last_table = {note: index for index, table in enumerate(answer.tables) for note in table.notes}
    tables = [
        replace(table, notes=[note for note in table.notes if last_table[note] == index])
        for index, table in enumerate(answer.tables)
    ]
    pictures = {}
    for name, draw in answer.pictures.items():
        # The name ends in a number where several have the same: ``flash, 2``.
        kind, comma, number = name.partition(", ")
        pictures[_CAPTIONS.get(kind, f"memory over one step, by what holds it: {kind}") + comma + number] = draw
    return replace(
        answer,
        machine="; ".join([answer.evidence.machine, *environment_words(runs)]) if runs else "",
        commands=list(dict.fromkeys(map(typed_command, runs))) or list(lines),
        tables=tables,
        pictures=pictures,
        missing=missing,
    )


def environment_words(runs: Iterable[Run]) -> list[str]:
    """Name the variables under which ranks communicated, in one clause or none; ranks of a CPU have Gloo's alone."""
    of_ranks = [run for run in runs if run.arguments and run.arguments[0] in ("allreduce", "ddp", "shard", "verify")]
    prefixes: tuple[str, ...] = ("GLOO_",)
    if any(run.machine.get("gpu") for run in of_ranks):
        prefixes = ("GLOO_", "NCCL_", "TORCH_NCCL_", "TORCH_SYMM_")
    variables = {item for run in of_ranks for item in run.environment.items() if item[0].startswith(prefixes)}
    # NCCL_VERSION, of NVIDIA's container images, changes nothing.
    names = sorted(f"{name}={value}" for name, value in variables if not name.endswith("_VERSION"))
    no_multicast = {"NCCL_NVLS_ENABLE=0", "TORCH_SYMM_MEM_DISABLE_MULTICAST=1"}
    multicast = ", which turns NVLink multicast off" if no_multicast & {*names} else ""
    return [f"with {', '.join(names)}{multicast}"] if names else []


def typed_command(run: Run) -> str:
    """Return the command line as it was typed, without the options that say where results went."""
    kept = ["cs336sys"]
    arguments = iter(run.arguments)
    for argument in arguments:
        if argument in _FILE_OPTIONS:
            next(arguments, None)  # "--save", "FILE"; below is "--save=FILE"
        elif argument.partition("=")[0] not in (*_FILE_OPTIONS, "--resume", "--resume-any"):
            kept.append(argument)
    return shlex.join(kept)


def _fenced(lines: Sequence[str]) -> str:
    """Put lines of a shell between more backticks than they hold."""
    text = "\n".join(map(printable, lines))
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}sh\n{text}\n{fence}"


_PAGE_ROWS = 40  # Rows that fit on a printed page: LaTeX breaks no table across pages.


def _latex_markup(text: str) -> str:
    # LaTeX breaks no line inside a word, and names of options and settings are long.
    return escape_latex(text).replace(r"\_", r"\_\allowbreak{}")


def _latex_code(text: str) -> str:
    # Two hyphens would become a dash.
    return rf"\texttt{{{_latex_markup(text).replace('--', '-{}-')}}}"


def _latex_pages(table: Table) -> str:
    """Write a table as LaTeX tables of at most a page each, the title above all, the notes below the last."""
    pages = []
    for start in range(0, max(1, len(table.rows)), _PAGE_ROWS):
        end = start + _PAGE_ROWS
        title = table.title if start == 0 else f"{table.title} (continued)"
        notes = table.notes if end >= len(table.rows) else ()
        text = render([replace(table, title=title, rows=table.rows[start:end], notes=notes)], "latex").strip()
        # H: here, and not where LaTeX finds room. The rest makes a table smaller that is wider than the page.
        text = text.replace(r"\begin{table}", r"\begin{table}[H]")
        tabular = r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{\begin{tabular}"
        pages.append(text.replace(r"\begin{tabular}", tabular).replace(r"\end{tabular}", r"\end{tabular}}"))
    return "\n\n".join(pages)


def _markdown_table(table: Table) -> str:
    """Write a table with its title in italics, for titles are no headings of a write-up."""
    return re.sub("^### (.*)$", r"*\1*", render([table], "markdown"), count=1, flags=re.M).strip()


class _Markup(NamedTuple):
    """The markup of text, code and tables in a format, whose template marks up the rest."""

    text: Callable[[str], str]
    code: Callable[[str], str]
    table: Callable[[Table], str]


_MARKUPS = {
    "markdown": _Markup(escape_markdown, "`{}`".format, _markdown_table),
    "latex": _Markup(_latex_markup, _latex_code, _latex_pages),
    "typst": _Markup(
        lambda text: f"#text({typst_string(text)})",
        lambda text: f"#raw({typst_string(text)})",
        lambda table: render([table], "typst").strip(),
    ),
    "html": _Markup(
        html.escape, lambda text: f"<code>{html.escape(text)}</code>", lambda table: html_table(table, "h4")
    ),
}

_PAGES = ("html", "pdf")  # Formats that are one page with its pictures.

# Takes a picture's name and the function that draws it to a file, and returns the file's name or the picture's HTML;
# None for a picture that is left out.
PlacePicture = Callable[[str, Callable[[Path], None]], str | None]


def document_text(document: Document, format: str, place_picture: PlacePicture) -> str:
    """Return the document in one of the formats of :data:`_MARKUPS`."""
    from jinja2 import Environment, PackageLoader

    markup = _MARKUPS[format]
    loader = PackageLoader("cs336sys.commands.report", "formats")
    # LaTeX and Typst are full of braces.
    delimiters: dict[str, Any] = {"variable_start_string": "<<", "variable_end_string": ">>"}
    environment = Environment(loader=loader, trim_blocks=True, lstrip_blocks=True, **delimiters)
    environment.filters |= {"text": markup.text, "code": markup.code, "fenced": _fenced, "quoted": typst_string}
    template = environment.get_template(f"{format}.jinja")

    def inline(text: str) -> str:
        """Mark up running text, whose code stands between backticks."""
        # Text and code alternate, so that code has the odd indices.
        pieces = enumerate(one_line(text).split("`"))
        marked = (markup.code(piece) if index % 2 else markup.text(piece) for index, piece in pieces if piece)
        return "".join(marked)

    def mark_up(kind: str, facts: dict[str, Any]) -> str:
        """Fill the template's block that is named after the kind of piece; where it has none, return the text alone."""
        if "text" in facts:
            facts = facts | {"text": inline(facts["text"])}
        block = template.blocks.get(kind)
        return "".join(block(template.new_context(facts))).removesuffix("\n") if block else facts.get("text", "")

    marked = (
        markup.table(facts["table"]) if kind == "table" else mark_up(kind, facts)
        for kind, facts in _pieces(document, place_picture)
    )
    body = "\n\n".join(filter(None, marked))
    if format == "html":  # html_page() makes pages of all commands; other templates have a block "document".
        return html_page(document.title, [body], (files(__package__) / "formats" / "document.css").read_text().rstrip())
    return mark_up("document", {"title": inline(document.title), "body": body}) + "\n"


def _pieces(document: Document, place_picture: PlacePicture) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the document's pieces from top to bottom: a kind, a block of the templates, and the facts for it."""
    for sentence in sentences(__name__, "introduction", document=document):
        yield "paragraph", {"text": sentence}
    yield "contents", {"names": [problem.name for problem, _ in document.problems]}
    for problem, sections in document.problems:
        yield "problem", {"name": problem.name}
        for section in sections:
            if section.letter:
                yield "part", {"name": problem.name, "letter": section.letter}
            for answer in section.answers:
                if answer.machine:
                    yield "machine", {"text": answer.machine}
                if answer.commands:
                    yield "commands", {"lines": answer.commands}
                yield from (("table", {"table": table}) for table in answer.tables)
                yield from (("paragraph", {"text": sentence}) for sentence in answer.sentences)
                yield from (("absent", {"text": item}) for item in answer.missing)
                placed = ((place_picture(name, draw), name) for name, draw in answer.pictures.items())
                yield from (("picture", {"path": picture, "name": name}) for picture, name in placed if picture)
            if not section.answers:
                (sentence,) = sentences(__name__, "absent", lines=section.measuring_lines)
                yield "absent", {"text": sentence}
    yield from (("fault", {"text": fault}) for fault in document.faults)


def write_document(document: Document, format: str, output: Path | None) -> list[str]:
    """Write the document to the file, or to stdout; pictures go to files next to it, or into the page or PDF itself.

    Return a sentence for each reason for which pictures were left out. An OutputError says that it cannot be written.
    """
    file = None if output == STDOUT else output
    notes: list[str] = []
    file_names: list[str] = []

    def place_picture(name: str, draw: Callable[[Path], None]) -> str | None:
        """Draw a picture into a page, or to a file next to the document; None for stdout, or if it cannot be drawn."""
        try:
            if format in _PAGES:
                return html_picture(draw, name)
            if file is not None:
                path = file.with_name(f"{file.stem}-{len(file_names) + 1:02}.png")
                draw(path)
                file_names.append(path.name)
                return path.name
        except FAULTS as error:
            notes.append(f"left out a picture, because its saved data cannot be drawn: {error}")
        return None

    text = document_text(document, "html" if format in _PAGES else format, place_picture)
    if file is None:
        with writing_stdout():
            sys.stdout.write(text)
    else:
        content = print_page(text, find_browser("--output")) if format == "pdf" else text.encode()
        write_file(file, content, "--output")
    return list(dict.fromkeys(notes))
