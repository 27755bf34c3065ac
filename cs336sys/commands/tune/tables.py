"""The tables and the picture of ``tune``: what is predicted to be the fastest, and what measuring it showed."""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cs336sys.accounting.memory import GIB
from cs336sys.accounting.step_time.choice import Candidate, Choice, measuring_command, pytorch_lines
from cs336sys.accounting.step_time.prediction import StepConfiguration
from cs336sys.accounting.step_time.rates import Rates, short_gpu_name
from cs336sys.findings import sentence
from cs336sys.results.comparison import Comparison, Measured, compare_samples
from cs336sys.results.model import Cell, Run
from cs336sys.settings.parallel import ParallelWorkload
from cs336sys.tables.numbers import Value
from cs336sys.tables.outputs import new_axes, write_figure
from cs336sys.tables.predictions import PREDICTED_COLUMNS, configuration_words, error_notes, step_row
from cs336sys.tables.saved import SavedCommand, of_run
from cs336sys.tables.table import Column, Table, fill_row, named_columns, with_rows
from cs336sys.tables.titles import by_configuration, known_values

_MOST_ROWS = 10  # Of the tables of candidates.
_MORE_MEMORY = 20 * GIB  # The table of what more would buy asks about so many more bytes.

_PREDICTED = (Column("configuration", "configuration"), *PREDICTED_COLUMNS)


def _candidate_row(candidate: Candidate, rates: Rates) -> dict[str, Value]:
    return step_row(candidate.configuration, candidate.time, rates, candidate.memory)


def choice_tables(
    choice: Choice, rates: Rates, with_one_more_gpu: Choice | None, lines_of: int = 1, *, is_ours: bool = True
) -> list[Table]:
    """Return the fastest that fit, the Pareto front, what did not fit, what more would buy, and what was left out.

    ``with_one_more_gpu`` is what would be chosen then; the ``lines_of`` fastest are also written as lines of PyTorch.
    """
    best = choice.fitting[:_MOST_ROWS]
    facts = {"fitting": len(choice.fitting), "limit_gib": choice.limit / GIB}
    # With ``unknown`` ones, which run, too: they are unlike all that was measured, so that nobody can predict them.
    facts["runnable"] = len(choice.predicted) + sum(choice.unknown.values())
    notes = [sentence(__package__, "predicted", **facts), *error_notes(rates)]
    if not is_ours:
        notes.append(sentence(__package__, "user model"))
    title = f": {best[0].configuration.training.size.name}, {short_gpu_name(rates.gpu)}" if best else ""
    rows, commands, lines = [], [], []
    for rank, candidate in enumerate(best, 1):
        number = {"number": rank}
        rows.append(number | _candidate_row(candidate, rates))
        commands.append(number | {"command": measuring_command(candidate.configuration)})
        if rank <= lines_of:
            lines += [number | {"line": line} for line in pytorch_lines(candidate.configuration)]
    front = [_candidate_row(candidate, rates) for candidate in choice.front]
    unlike = [(f"unlike what was measured: {reason}", count) for reason, count in choice.unknown.most_common()]
    reasons = [*choice.refused.most_common(), *unlike]
    left_out: list[dict[str, Value]] = [{"reason": reason, "combinations": count} for reason, count in reasons]
    numbered = Column("number", "#")
    left_out_columns = (Column("reason", "because"), Column("combinations", "combinations", "count"))
    return with_rows(
        Table("best", f"The fastest that fit{title}", (numbered, *_PREDICTED), rows, notes),
        Table("commands", "Commands that measure them", (numbered, *named_columns("command")), commands),
        Table("lines", "The same as lines of PyTorch", (numbered, *named_columns("line")), lines),
        Table("front", "Least memory for its speed", _PREDICTED, front),
        _rejected_table(choice, rates),
        _more_table(choice, with_one_more_gpu),
        Table("left_out", "Left out", left_out_columns, left_out),
    )


def _rejected_table(choice: Choice, rates: Rates) -> Table:
    """Return the table of candidates that exceed the memory limit, and would be faster than all that fit."""
    # The last predicted column, what sets the step's time, gives way to the memory that is lacking.
    columns = (*_PREDICTED[:-1], Column("over_gib", "over the limit by", "gib"))
    rows = [
        _candidate_row(candidate, rates) | {"over_gib": (candidate.memory - choice.limit) / GIB}
        for candidate in choice.faster_but_too_large[:_MOST_ROWS]
    ]
    too_large_count = sum(candidate.memory > choice.limit for candidate in choice.predicted)
    faster_count = len(choice.faster_but_too_large)
    notes = (sentence(__package__, "too large", too_large=too_large_count, faster=faster_count),)
    return Table("rejected", "Faster, and too large", columns, rows, notes)


def _more_table(choice: Choice, with_one_more_gpu: Choice | None) -> Table:
    """Return the table of the fastest within the limit, with more memory, and with one more GPU."""
    now = choice.best_within(choice.limit)
    columns = (
        Column("with", "with"),
        Column("tokens_per_s", "tokens/s", "tokens_per_s", lambda best: best.tokens_per_s),
        Column("gain", "gain", "ratio", lambda best: None if now is None else best.tokens_per_s / now.tokens_per_s),
        Column("configuration", "configuration", value=lambda best: configuration_words(best.configuration)),
    )
    limits = (choice.limit, choice.limit + _MORE_MEMORY)
    bests = {f"{limit / GIB:.4g} GiB": choice.best_within(limit) for limit in limits}
    if with_one_more_gpu is not None:
        bests["one more GPU"] = with_one_more_gpu.best_within(choice.limit)
    rows = [{"with": name} | fill_row(columns, best) for name, best in bests.items() if best is not None]
    return Table("more", "What more would buy", columns, rows)


def plot_front(choice: Choice, path: Path) -> None:
    """Draw tokens/s over memory: all configurations, the Pareto front, and the limit."""
    figure, ((axes,),) = new_axes(width=8, height=5)

    def points(candidates: Sequence[Candidate]) -> tuple[list[float], list[float]]:
        memories_gib = [candidate.memory / GIB for candidate in candidates]
        return memories_gib, [candidate.tokens_per_s for candidate in candidates]

    axes.scatter(*points(choice.predicted), s=4, color="0.7", label="configurations")
    front_style: dict[str, Any] = {"where": "post", "marker": "o", "markersize": 4}
    axes.step(*points(choice.front), label="least memory for its speed", **front_style)
    axes.axvline(choice.limit / GIB, color="0.3", linestyle="--", label=f"limit, {choice.limit / GIB:.4g} GiB")
    axes.set(xlabel="memory of a rank, GiB", ylabel="tokens/s")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    write_figure(figure, path)


def configuration_of(cell: Cell) -> StepConfiguration:
    """Return the configuration that a cell of ``tune`` measured; cells of several ranks are those of ``shard``."""
    if "accumulation" in cell.configuration:
        return StepConfiguration.from_configuration(cell.configuration)
    return StepConfiguration.of_parallel(ParallelWorkload.from_configuration(cell.configuration))


def million_token_ms(cells: Sequence[Cell]) -> Measured:
    """Return the milliseconds of a million tokens in the rounds of a configuration, to compare any sizes of batches."""
    scale = 1e6 / configuration_of(cells[0]).tokens
    rounds = []
    for cell in cells:
        step = cell.samples["step"]
        rounds.append(replace(step, measured=tuple(scale * value for value in step.measured), warmup=()))
    return Measured((tuple(rounds),))  # One run, of these rounds.


def fully_measured(groups: dict[str, list[Cell]]) -> dict[str, list[Cell]]:
    """Return the configurations all of whose rounds ran and computed what they should."""
    return {key: cells for key, cells in groups.items() if all(cell.status == "ok" for cell in cells)}


def fastest(groups: dict[str, list[Cell]]) -> str | None:
    """Return the key of the configuration with the least median time of a token; None if none was measured."""
    measured = fully_measured(groups)
    return min(measured, key=lambda key: statistics.median(million_token_ms(measured[key]).all_values), default=None)


def compared_to_best(groups: dict[str, list[Cell]], best: str) -> dict[str, Comparison]:
    """Compare every other measured configuration with the best, as ``compare`` does, in the rounds that both have."""
    best_cells = groups[best]
    return {
        key: compare_samples(million_token_ms(best_cells[: len(cells)]), million_token_ms(cells[: len(best_cells)]))
        for key, cells in fully_measured(groups).items()
        if key != best
    }


# Samples that follow one another resemble each other: two processes that measured one step on an H200 (medium, batch 8,
# in a graph) were 1.8 % apart, and five samples of each called that a difference. One round decides five times as much.
_BEYOND_ROUNDS = 1.1
_BEYOND_ROUNDS_CPU = 1.5  # On a CPU of two shared cores neighbouring rounds of one step were up to 30 % apart.


def is_decided(comparison: Comparison, device: str) -> bool:
    """Return whether one is slower, or faster, for certain: in several rounds, or in one by more than rounds differ."""
    difference = comparison.difference
    if difference is None or difference.ratio_low is None or comparison.verdict not in ("slower", "faster"):
        return False
    beyond_rounds = _BEYOND_ROUNDS_CPU if device == "cpu" else _BEYOND_ROUNDS
    return difference.level == "rounds" or difference.ratio_low > beyond_rounds


def tune_tables(cells: Sequence[Cell], run: Run | None) -> list[Table]:
    """Return what was measured, the fastest first, with what was predicted alongside it."""
    groups = by_configuration(cells)
    best = fastest(groups)
    compared = {} if best is None else compared_to_best(groups, best)
    rows = [_measured_row(key, group, best, compared) for key, group in groups.items()]
    rows.sort(key=lambda row: -(row.get("tokens_per_s") or 0))  # type: ignore[operator]
    notes = [] if best is None else [_winner(groups, best, compared)]
    reasons = dict.fromkeys(str(cell.reason) for cell in cells if cell.reason)
    machine = run.machine.get("gpu") or run.machine.get("cpu") if run is not None else None
    title = "Measured" + (f" on {machine}" if machine else "")
    columns = (
        *named_columns("configuration", "status"),
        Column("rounds", "rounds", "count"),
        *named_columns("predicted_ms", "step_ms", "off_percent", tokens_per_s="tokens/s"),
        *named_columns(slower_percent="slower than the best", verdict="verdict", predicted_gib="predicted memory"),
        *named_columns(peak_gib="memory of a rank"),
    )
    return [Table("measured", title, columns, rows, [*notes, *reasons], steadier="more --budget")]


def _measured_row(key: str, cells: list[Cell], best: str | None, compared: dict[str, Comparison]) -> dict[str, Value]:
    """Return the row of one configuration's rounds: their step and how it compares, if all of them ran."""
    first, configuration = cells[0], configuration_of(cells[0])
    row: dict[str, Value] = dict(first.configuration)
    row |= {"configuration": configuration_words(configuration), "rounds": len(cells)}
    row |= {"status": next((cell.status for cell in cells if cell.status != "ok"), "ok")}
    row |= {name: first.derived.get(name) for name in ("predicted_ms", "predicted_gib")}
    if row["status"] != "ok":
        return row
    step_ms = statistics.median(value for cell in cells for value in cell.samples["step"].measured)
    predicted_ms = first.derived.get("predicted_ms")
    row |= {"step_ms": step_ms, "tokens_per_s": 1e3 * configuration.tokens / step_ms}
    row["off_percent"] = None if predicted_ms is None else 100 * (predicted_ms / step_ms - 1)
    row["peak_gib"] = max(known_values(cells, "peak_gib"), default=None)
    if key in compared:
        comparison = compared[key]
        # A verdict that may be due to how rounds of one configuration differ is not shown.
        is_shown = comparison.verdict == "same" or is_decided(comparison, first.configuration["device"])
        row["slower_percent"] = comparison.slower_percent
        row["verdict"] = comparison.verdict_text if is_shown else "undecided"
    elif key == best:
        row["verdict"] = "best"
    return row


def _winner(groups: dict[str, list[Cell]], best: str, compared: dict[str, Comparison]) -> str:
    """Name the best configuration, from how many others it cannot be told apart, and by how much others are slower."""
    intervals = []
    for key, comparison in compared.items():
        difference = comparison.difference
        if difference is None or difference.ratio_low is None or difference.ratio_high is None:
            continue  # Too few samples for an interval.
        other = configuration_words(configuration_of(groups[key][0]))
        intervals.append((other, 100 * (difference.ratio_low - 1), 100 * (difference.ratio_high - 1)))
    winner = groups[best][0]
    undecided = sum(not is_decided(comparison, winner.configuration["device"]) for comparison in compared.values())
    name = configuration_words(configuration_of(winner))
    return sentence(__package__, "winner", winner=name, undecided=undecided, intervals=intervals)


SAVED = SavedCommand(of_run(tune_tables))
