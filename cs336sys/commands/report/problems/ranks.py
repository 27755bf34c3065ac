"""All-reduces, and training by several ranks: measured, and on paper (how links bound it, and the XXL model).

The sentence ``common.stand_in`` says where cells are of another size than the handout's xl.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from cs336sys.accounting.communication import bucket_answers, ring_answers
from cs336sys.accounting.derivation import Derived
from cs336sys.accounting.flops import count_parameters
from cs336sys.accounting.hardware import H200_FLOPS_PER_S, NVLINK_BYTES_PER_S
from cs336sys.accounting.parallelism import Layer, Mesh, parallelism_answers
from cs336sys.accounting.sharding.step import state_answers
from cs336sys.accounting.xxl import XXL, TpuMesh, batch_answers, memory_answers
from cs336sys.commands.account.communication_tables import parallel_tables
from cs336sys.commands.allreduce.tables import groups_of
from cs336sys.commands.ddp.tables import bucket_sweeps, link_of
from cs336sys.commands.report.answer import Answer, Rows, facts_of, where
from cs336sys.commands.report.evidence import Selection, cells_of
from cs336sys.commands.report.problem import Command, Target, measurement, sized, training_sweep
from cs336sys.commands.shard.tables import COMPONENTS
from cs336sys.results.model import Cell
from cs336sys.settings.sizes import SIZES

_MESSAGES = (1_000_000, 10_000_000, 100_000_000, 1_000_000_000)
_COLUMNS = ("backend", "world_size", "size_bytes", "time_us", "algbw_gbps", "busbw_gbps", "wrong_elements", "status")
_FITTED = ("backend", "world_size", "latency_us", "bandwidth_gbps", "deviation_percent")


def all_reduce(answer: Answer) -> None:
    """Answer with all-reduces of the handout's sizes, each backend and number of ranks, and the fit to them."""
    groups = answer.find("allreduce", {"message_bytes": _MESSAGES}, collective=("all_reduce",), dtype=("fp32",))
    if not groups:
        return
    answer.show(groups, "allreduce", *_COLUMNS, medians=True, join=True, keep=_with_rates_of_medians)
    answer.show(groups, "fit", *_FITTED, join=True, keep=lambda rows: where(rows, timing="back to back"))
    answer.draw(groups[:1])  # Of the invocation with most cells.
    sweeps: list[dict[str, Any]] = []
    for sweep, cells in (item for group in groups for item in groups_of(group.cells).items()):  # cells by rising size
        smallest, largest = (cell.samples["back_to_back"] for cell in (cells[0], cells[-1]))
        ends = {"smallest": smallest, "largest": largest, "bytes": cells[-1].derived["size_bytes"]}
        sweeps.append(sweep._asdict() | ends)
    sweeps.sort(key=lambda sweep: sweep["world_size"])
    links = {cell.derived.get("link") or "" for cell in cells_of(groups)}
    answer.write("ranks.all_reduce", sweeps=sweeps, links=sorted(links))
    has_gpu = any(run.machine.get("gpu") for group in groups for run in group.invocation.runs)
    # 2025 asks for both backends.
    backends = ["gloo"] * (answer.handout.year == 2025) + ["nccl"] * has_gpu
    answer.lack_unmeasured("{backend} with {world_size} ranks", sweeps, {"backend": backends, "world_size": (2, 4, 6)})


def _with_rates_of_medians(rows: Rows) -> Rows:
    """Turn rates, which are of the mean call, into those of the median call, which is shown; failed rows have none."""

    def rate_of_median(row: Mapping[str, Any], name: str) -> float | None:
        return row[name] and row[name] * row["time_us"].mean / row["time_us"].median

    rates = ("algbw_gbps", "busbw_gbps")
    return [{**row, **{name: rate_of_median(row, name) for name in rates if "time_us" in row}} for row in rows]


def _all_reduce_grid(target: Target) -> list[Command]:
    """Plan all-reduces of the handout's sizes, with the backends and as many ranks as its GPUs allow."""
    planned: list[Command] = []
    backends = ("gloo", "nccl") if target.handout.year == 2025 else ("nccl",)
    for backend in backends if target.gpus else ("gloo",):
        # Ranks of Gloo share what there is, NCCL wants a GPU for each: a machine with one is told that it needs two.
        ranks = [count for count in (2, 4, 6) if backend == "gloo" or count <= max(2, target.gpus)]
        gpus = 1 if backend == "gloo" else max(ranks)
        options = f"--backend {backend} --world-size {','.join(map(str, ranks))} --message 1MB,10MB,100MB,1GB"
        planned += measurement(f"allreduce {options}", seconds=60.0 * len(ranks), gpus=gpus)(target)
    return planned


_SMALL_GRID = "--backend gloo --world-size 2 --message 10KB,100KB,1MB --steps 5"
all_reduce_commands = sized(_all_reduce_grid, measurement(f"allreduce {_SMALL_GRID}", seconds=15))

_STEP_COLUMNS = ("strategy", "bucket_mb", "step_ms", "unsynchronized_ms", "exposed_ms", "running_ms", "calls")

# Columns that templates ask for, with None for rows that lack them.
_OPTIONAL: dict[str, Any] = {"timeline": None, "exposed_ms": None, "synchronize_ms": None}


def _ddp_series(answer: Answer) -> Selection | None:
    """Choose the invocation that answers all problems about DDP, so that their answers agree.

    It is the one with most of the strategies that the handout names, with the 10 steps that it asks for, launched
    rather than in CUDA graphs.
    """
    plain = {"compile": ("off",), "precision": ("fp32",), "attention": ("reference",)}
    wanted = {"size": (answer.handout.xl,), "world_size": (2,), "batch_size": (4,), "context": (512,)}
    strategies = {"naive", "flat", "overlap"} | ({"bucketed"} if answer.handout.year == 2025 else set())

    def lacking(group: Selection) -> tuple[int, int, bool]:
        fewest_steps = min((len(cell.samples["step"].measured) for cell in group.measured), default=0)
        missing_strategies = len(strategies - group.by("strategy").keys())
        return missing_strategies, max(10 - fewest_steps, 0), group.setting("cuda_graph") == "on"

    return min(answer.find_each("ddp", {**wanted, **plain, "gradient_dtype": ("fp32",)}), key=lacking, default=None)


def _steps(block: str, *strategies: str, draws: str = "", needs: str = "strategy") -> Callable[[Answer], None]:
    """Return a function that answers with DDP steps of these strategies, if naive and the last one were measured.

    It shows the pictures whose name is ``draws``, and needs the column ``needs`` of every step (all have a strategy).
    """

    def answer_with_steps(answer: Answer) -> None:
        """Answer from the one invocation that all problems about DDP share, if it has the strategies and the column."""
        series = _ddp_series(answer)
        group = series and series.only(lambda cell: cell.configuration["strategy"] in strategies)
        if group is None or not {"naive", strategies[-1]} <= group.by("strategy").keys():
            return
        rows = [{**_OPTIONAL, **row} for row in where(group.rows("ddp"), status="ok")]
        for row in rows:
            row["name"] = f"{row['bucket_mb']:g} MB" if row["strategy"] == "bucketed" else row["strategy"]
        if all(row[needs] for row in rows):
            answer.show([group], "ddp", *_STEP_COLUMNS, medians=True)
            answer.show([group], "buckets", medians=True)
            answer.draw([group] if draws else (), draws)
            answer.write("common.stand_in", **group.cells[0].configuration)
            answer.write(f"ranks.{block}", rows=rows, buckets=group.rows("buckets"))

    return answer_with_steps


naive = _steps("steps", "naive")
flat = _steps("steps", "naive", "flat")
overlapped = _steps("steps", "naive", "flat", "overlap")
traces = _steps("traces", "naive", "overlap", draws="timelines", needs="timeline")
buckets = _steps("buckets", "naive", "flat", "overlap", "bucketed", draws="buckets")


def xl_command(target: Target, command: str, *flags: str, cells: int, **options: Any) -> Command:
    """Plan a sweep of so many ``cells`` of the handout's xl on two ranks; the first of ``flags`` says what differs."""
    sizes = target.sizes((target.handout.xl,))
    # The commands' defaults are what the handouts ask for.
    counts = ("--warmup", "1", "--steps", "4") if target.is_small else ()
    option, values, *others = flags  # So that the line begins with what is compared.
    flags = (option, values, "--world-size", "2", *counts, *others)
    # A cell takes 20 steps, and 15 s besides. training_sweep() multiplies ``steps`` by the cells that ``options`` make,
    # fewer than ``cells``, because flags have lists, too.
    steps = round(20 * cells / math.prod(map(len, options.values())))
    planned = training_sweep(target, command, sizes, flags=flags, steps=steps, ranks=2, **options)
    return replace(planned, seconds=planned.seconds + 15 * cells)


def ddp_commands(target: Target) -> list[Command]:
    """Plan one sweep for all of these problems: only cells of one run are compared."""
    if target.handout.year == 2026:
        return [xl_command(target, "ddp", "--mode", "naive,flat,overlap", cells=3)]
    sizes = "0.05,0.1,1" if target.size == "tiny" else "1,10,100,1000"
    flags = ("--mode", "naive,flat,overlap,bucketed", "--bucket-mb", sizes)
    # Buckets of each size are a cell; the three other strategies have one each.
    return [xl_command(target, "ddp", *flags, cells=3 + len(sizes.split(",")))]


def bucket_equation(answer: Answer) -> None:
    """Answer with the equation for bucket sizes, with the costs that the DDP sweep's buckets were fitted by, if any."""
    group = _ddp_series(answer)
    # Unless measured: xl in fp32 and 100 buckets, at 200 GB/s and 20 us a call, which the template names.
    gradient_bytes, buckets, bytes_per_s, call_s = 4 * count_parameters(SIZES["xl"]), 100, 200e9, 20e-6
    if group is not None and (sweeps := bucket_sweeps(group.measured)):
        smallest_buckets = sweeps[0][0]  # A sweep begins with its smallest buckets; one is enough for the equation.
        link, derived = link_of(smallest_buckets), smallest_buckets.derived
        if link.has_bandwidth and link.latency_s:
            gradient_bytes, buckets = derived["communicated_bytes"], derived["gradient_calls"]
            bytes_per_s, call_s = link.bytes_per_s, link.latency_s
            answer.measured_by([group])
    derived_sizes = bucket_answers(gradient_bytes, buckets, bytes_per_s, call_s)
    answer.derive(derived_sizes, table="formulas", title="bucket sizes by the equation")
    answer.write("ranks.bucket_equation", is_measured=bool(answer.runs))


_FSDP_COLUMNS = ("strategy", "prefetch", "step_ms", "speedup", "exposed_ms", "calls", "sent_bytes", "bare_ms", "status")
_MEMORY_COLUMNS = ("strategy", "moment", *(f"{part}_gib" for part in COMPONENTS), "total_gib")
_SHARDED = ("optimizer", "optimizer-flat")


def _shard_steps(answer: Answer, *strategies: str, cuda_graph: str = "off") -> list[Selection]:
    """Find steps of the handout's xl on two ranks: launched ones or else those in CUDA graphs; ``"on"``: only these."""
    plain = {"compile": ("off",), "cuda_graph": (cuda_graph,), "checkpointing": ("none",)}
    wanted = {"size": (answer.handout.xl,), "world_size": (2,), "context": (512,), "batch_size": (4,), **plain}
    groups = answer.find("shard", wanted, strategy=strategies)  # ``wanted`` is a preference: others may be found.
    return [group for group in groups if cuda_graph == "off" or group.setting("cuda_graph") == "on"]


def _follows_handout(group: Selection) -> bool:
    """Return whether steps have the handout's own attention and AdamW."""
    return (group.setting("attention"), group.setting("optimizer")) == ("reference", "course")


def _sharded_steps(answer: Answer) -> list[Selection]:
    """Find runs with and without a sharded optimizer, one precision each, launched ones before those in graphs."""
    # Where no steps were launched, this finds those in graphs, which are left out: they are found again below.
    launched = _shard_steps(answer, "none", *_SHARDED)
    launched = [group for group in launched if group.setting("cuda_graph") == "off"]
    runs = []
    for group in [*launched, *_shard_steps(answer, "none", *_SHARDED, cuda_graph="on")]:
        cells_by_precision: dict[str, list[Cell]] = {}
        for cell in group.cells:
            cells_by_precision.setdefault(cell.configuration["precision"], []).append(cell)
        runs += [Selection(group.invocation, cells) for cells in cells_by_precision.values()]
    return [group for group in runs if "none" in group.by("strategy") and len(group.by("strategy")) > 1]


def _show_memory(answer: Answer, group: Selection, **moment: Any) -> Rows:
    """Show what a rank holds (``moment="peak"``: only then), titled by how its steps were measured; return the rows."""
    answer.show([group], "memory", *_MEMORY_COLUMNS, keep=lambda rows: where(rows, source="measured", **moment))
    steps = group.tables("shard")[0].title
    answer.tables[-1] = replace(answer.tables[-1], title=f"{answer.tables[-1].title}; {steps}")
    answer.write("common.stand_in", **group.cells[0].configuration)
    return where(group.rows("memory"), source="measured", **moment)


def memory(answer: Answer) -> None:
    """Answer with what a rank holds with and without a sharded optimizer, best with the handout's model and AdamW."""
    runs = sorted(_sharded_steps(answer), key=lambda group: not _follows_handout(group))
    # Every precision of the first invocation.
    for group in [run for run in runs if run.invocation is runs[0].invocation]:
        rows = _show_memory(answer, group)
        answer.write("ranks.memory", rows=rows, plain=facts_of(group.by("strategy")["none"]))
        answer.draw([group], "memory")


def speeds(answer: Answer) -> None:
    """Answer with the time of a step with and without a sharded optimizer, in each precision."""
    runs = [group for group in _sharded_steps(answer) if "optimizer" in group.by("strategy")]
    runs.sort(key=lambda group: (not _follows_handout(group), -group.setting("steps")))  # then by most steps
    # Of each precision the first run: backwards, it is the last and replaces the others. Then in their order again.
    groups = list({run.setting("precision"): run for run in reversed(runs)}.values())[::-1]
    for group in groups:
        answer.show([group], "shard", *_FSDP_COLUMNS, medians=True)
        answer.show([group], "phases", medians=True)
        answer.write("common.stand_in", **group.cells[0].configuration)
        answer.write("ranks.speeds", cells=list(map(facts_of, group.measured)))
    if groups:
        measured = [group.cells[0].configuration for group in groups]
        answer.lack_unmeasured("the same in {precision}", measured, {"precision": ("fp32", "bf16")})


def against_zero(answer: Answer) -> None:
    """Answer part (c) by formulas: what both sharded optimizers send, and how that compares with ZeRO."""
    size = SIZES[answer.handout.xl]
    derived = [value for strategy in _SHARDED for value in state_answers(size, world_size=2, strategy=strategy)]
    sent = [value for value in derived if value.question.endswith("(c)")]
    answer.derive(sent, table="sent", title="what each sends, optimizer-flat second")
    answer.write("ranks.against_zero")


def shard_commands(target: Target) -> list[Command]:
    flags = ("--strategy", "none,optimizer,optimizer-flat")
    return [xl_command(target, "shard", *flags, cells=6, precision=("fp32", "bf16"))]


def fsdp_memory(answer: Answer) -> None:
    """Answer with the state of a rank by formulas, and with the peak that one run measured with and without FSDP."""
    answers = state_answers(SIZES[answer.handout.xl], world_size=2, strategy="fsdp")
    answer.derive(answers, table="state", title="training state of a rank, FSDP on 2 ranks")
    runs = _shard_steps(answer, "none", "optimizer", "fsdp")
    for group in [run for run in runs if {"none", "fsdp"} <= run.by("strategy").keys()][:1]:  # The first, if any.
        peaks = {row["strategy"]: row for row in _show_memory(answer, group, moment="peak")}
        # Bytes of fp32 a parameter that only FSDP shards: weight, gradient and two moments; or, as ``optimizer`` shards
        # the moments, the first two.
        per_parameter = {name: count for name, count in (("none", 16), ("optimizer", 8)) if name in peaks}
        facts = {"cell": facts_of(group.by("strategy")["fsdp"]), "peaks": peaks, "per_parameter": per_parameter}
        answer.write("ranks.fsdp_memory", parts=COMPONENTS, **facts)


def fsdp_gathers(answer: Answer) -> None:
    """Answer with how late each all-gather comes, and with communication alone from steps in CUDA graphs."""
    runs = [run.only(lambda cell: cell.derived.get("gathers")) for run in _shard_steps(answer, "fsdp")]
    for group in [run for run in runs if run.measured][:1]:  # The first, where any has such cells.
        in_graphs = list(filter(_follows_handout, _shard_steps(answer, "fsdp", cuda_graph="on")))
        cells = sorted(map(facts_of, group.measured), key=lambda cell: cell["prefetch"])
        graph_cells = [facts_of(cell) for graph_run in in_graphs for cell in graph_run.measured]
        # Of these a profile has shown communication next to which nothing was computed.
        settled = [cell for cell in graph_cells if cell.get("bare_ms")]
        # Steps of a cell that differ by more than 10 % had not settled, or something else ran.
        unsettled = [cell for cell in cells if max(cell["step"].measured) > 1.1 * min(cell["step"].measured)]
        # Unsettled steps do not tell what communication costs.
        columns = [name for name in _FSDP_COLUMNS if name not in ("speedup", "exposed_ms") or not unsettled]
        answer.show([group], "gathers")
        answer.show([group], "shard", *columns, medians=True)
        answer.show(in_graphs, "shard", *_FSDP_COLUMNS, medians=True)
        answer.draw([group], "timelines")
        answer.write("common.stand_in", **group.cells[0].configuration)
        answer.write("ranks.fsdp_gathers", cells=cells, unsettled=unsettled, settled=settled)
        answer.lack_unmeasured("prefetch {prefetch}", cells, {"prefetch": (0, 1, 2)})


def fsdp_commands(target: Target) -> list[Command]:
    options = {"precision": ("bf16",), "prefetch": ("0", "1", "2")}
    return [xl_command(target, "shard", "--strategy", "none,fsdp", cells=4, **options)]


# The defaults of `account xxl` and `account parallel`, where the handout gives no number.
_TOKENS, _LAYER_TOKENS, _DEVICES = 4 * 512, 131_072, 8
# All parallel problems are computed for this layer: one of 2.7b on H200s.
_WIDTHS = SIZES["2.7b"].d_model, SIZES["2.7b"].d_ff
_LAYER = Layer(_LAYER_TOKENS, *_WIDTHS, H200_FLOPS_PER_S, NVLINK_BYTES_PER_S, element_bytes=2)

# All devices along one axis; along two axes for 2D parallelism, so that both communicate.
_DATA_MESH = Mesh(fsdp=_DEVICES)
_MESHES = {"dp": _DATA_MESH, "fsdp": _DATA_MESH, "tp": Mesh(tp=_DEVICES), "fsdp-tp": Mesh(fsdp=4, tp=2)}


def _answer_of(
    question: str, derived: Sequence[Derived], block: str = "", **numbers: object
) -> Callable[[Answer], None]:
    """Return a function that answers ``PROBLEM (LETTER)`` by a table of its values, and a block with ``numbers``."""

    def answer_with_values(answer: Answer) -> None:
        table_name, _, _ = question.partition(" ")
        chosen = [value for value in derived if value.question == question]
        # Before them stand values that no question asks for and that their formulas name. Backwards, because a
        # definition's formula may name earlier ones.
        for definition in reversed(derived[: derived.index(chosen[0])] if chosen else []):
            symbol = re.compile(rf"(?<!\w){re.escape(definition.symbol)}(?!\w)")
            is_named = any(symbol.search(other.expression.formula) for other in chosen)
            if definition.symbol and not definition.question and is_named:
                chosen.insert(0, definition)
        if block:
            answer.write(f"ranks.{block}", **numbers)
        answer.derive(chosen, table=table_name, title=question)

    return answer_with_values


def xxl(letter: str) -> Callable[[Answer], None]:
    """Return the function that answers this part of ``communication_accounting``."""
    # The numbers are the handout's; a link sends 9e10 bytes/s in each direction.
    mesh = TpuMesh(x=16, y=4, m_x=2, m_y=1, flops_per_s=4.6e14, bytes_per_s=2 * 9e10)
    if letter in "ab":  # Of memory; the other parts are of the batch.
        derived = memory_answers(XXL, _TOKENS, gpu_bytes=80e9, device_bytes=95e9)
    else:
        derived = batch_answers(XXL, mesh)
    # (c) needs no sentence.
    block = {"a": "xxl_tokens", "b": "xxl_tokens", "d": "what_lowers_the_batch"}.get(letter, "")
    return _answer_of(f"communication_accounting ({letter})", derived, block, tokens=_TOKENS)


ring = _answer_of("alternate_ring_all_reduce", ring_answers(1_000_000_000, _DEVICES, NVLINK_BYTES_PER_S))


def parallel(problem: str, strategy: str, letters: str) -> list[Callable[[Answer], None]]:
    """Return the functions that answer these parts, the first with a sentence on the numbers put in."""
    blocks, derived = {letters[0]: "layer"}, parallelism_answers(strategy, _LAYER, _MESHES[strategy])
    return [_answer_of(f"{problem} ({letter})", derived, blocks.get(letter, ""), layer=_LAYER) for letter in letters]


def tp_backward(answer: Answer) -> None:
    answer.tables += [table for table in parallel_tables(["tp"], _LAYER, _DEVICES) if table.name == "tp_backward"]
