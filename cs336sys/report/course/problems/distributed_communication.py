"""``distributed_communication_single_node``: all-reduces by size, ranks and backend."""

from cs336sys.report.allreduce import fit_of, groups_of
from cs336sys.report.course.evidence import Evidence
from cs336sys.report.course.problem import Answer, Command, Handout, Part, Problem, Target, runs_of, simple
from cs336sys.report.course.words import change, failures, joined, spread, times, trend
from cs336sys.report.numbers import format_quantity
from cs336sys.results.model import Cell

_MESSAGES = (1_000_000, 10_000_000, 100_000_000, 1_000_000_000)


def _us(cell: Cell) -> float:
    return cell.samples["back_to_back"].median


def _size(cell: Cell) -> str:
    return format_quantity(cell.configuration["message_bytes"], "decimal_bytes")


def all_reduce(evidence: Evidence, handout: Handout) -> Answer | None:
    found = evidence.find("allreduce", {"message_bytes": _MESSAGES}, collective=("all_reduce",), dtype=("fp32",))
    if not found:
        return None
    groups = {key: cells for group in found for key, cells in groups_of(group.cells).items()}
    sentences = [*_of_messages(groups), *_of_ranks(groups), *_of_backends(groups), *_of_lines(groups)]
    sentences += failures(
        [cell for group in found for cell in group.cells],
        lambda cell: f"{cell.configuration['backend']} with {cell.configuration['world_size']} ranks",
    )
    tables = [
        table
        for group in found
        for table in group.table(
            "allreduce",
            *("backend", "world_size", "size_bytes", "time_us", "algbw_gbps", "busbw_gbps", "wrong_elements", "status"),
        )
    ]
    pictures = found[0].pictures()
    there = {(key.backend, key.world_size) for key in groups}
    has_gpu = any(group.run is not None and group.run.machine.get("gpu") for group in found)
    backends = ["gloo"] * (handout.year == 2025) + ["nccl"] * has_gpu
    missing = [
        f"{backend} with {ranks} ranks" for backend in backends for ranks in (2, 4, 6) if (backend, ranks) not in there
    ]
    return Answer(sentences, tables, pictures, runs_of(found), missing)


def _of_messages(groups: dict) -> list[str]:
    """Times of the smallest and the largest message, and the bandwidth between them."""
    sentences = []
    for key, cells in groups.items():
        first, last = cells[0], cells[-1]
        ends = [first, last] if len(cells) > 1 else [first]
        listed = joined(f"{format_quantity(_us(cell), 'us')} for {_size(cell)}" for cell in ends)
        sentence = f"{key.backend}, {key.world_size} ranks: {listed}"
        busbw = last.derived["back_to_back_busbw_gbps"]
        if busbw is not None and len(cells) > 1:
            grown = last.derived["back_to_back_algbw_gbps"] / first.derived["back_to_back_algbw_gbps"]
            sentence += (
                f", a bus bandwidth of {format_quantity(busbw, 'gbps')}; the bandwidth "
                f"{change(1, grown)} from the smallest to the largest message"
            )
        sentences.append(sentence + ".")
    return sentences


def _of_lines(groups: dict) -> list[str]:
    """Latency and bandwidth of each backend and number of ranks, by a line through its times."""
    sentences = []
    for key, cells in groups.items():
        line = fit_of(cells, "back_to_back")
        if line is not None and line.latency_s > 0 and len(cells) > 2:
            sentences.append(
                f"{key.backend}, {key.world_size} ranks: a line through the times is "
                f"{format_quantity(1e6 * line.latency_s, 'us')} + size / "
                f"{format_quantity(line.bytes_per_s / 1e9, 'gbps')}"
                f", so messages under {format_quantity(line.half_bandwidth_bytes, 'decimal_bytes')} spend most of "
                "their time on latency."
            )
    return sentences


def _of_ranks(groups: dict) -> list[str]:
    """How time depends on the number of ranks, at the largest message of each backend."""
    sentences = []
    for backend in dict.fromkeys(key.backend for key in groups):
        series = sorted((key.world_size, cells[-1]) for key, cells in groups.items() if key.backend == backend)
        sizes = {cell.configuration["message_bytes"] for _, cell in series}
        if len(series) < 2 or len(sizes) > 1:
            continue
        sentences.append(
            f"With {joined(str(ranks) for ranks, _ in series)} ranks the time of {_size(series[0][1])} over {backend} "
            f"{trend([_us(cell) for _, cell in series])}: "
            f"{joined(format_quantity(_us(cell), 'us') for _, cell in series)} (a ring sends 2 (n - 1) / n of it)."
        )
    return sentences


def _of_backends(groups: dict) -> list[str]:
    ratios = []
    for key, cells in groups.items():
        other = next((theirs for k, theirs in groups.items() if k == key._replace(backend="gloo")), ())
        by_size = {cell.configuration["message_bytes"]: cell for cell in other}
        if key.backend == "nccl":
            sizes = [cell.configuration["message_bytes"] for cell in cells]
            pairs = zip(sizes, cells, strict=True)
            ratios += [_us(by_size[size]) / _us(cell) for size, cell in pairs if size in by_size]
    if not ratios:
        return []
    return [
        f"Gloo on CPUs takes {spread(ratios)} as long as NCCL between GPUs"
        + (f", {times(max(ratios))} where it is worst." if len(ratios) > 1 else ".")
    ]


def all_reduce_commands(target: Target) -> list[Command]:
    if target.is_small:
        return [
            simple(
                target,
                *("allreduce", "--backend", "gloo", "--world-size", "2", "--message", "10KB,100KB,1MB"),
                *("--steps", "5"),
                seconds=15,
            )
        ]
    backends = "gloo,nccl" if target.handout.year == 2025 else "nccl"
    ranks = [count for count in (2, 4, 6) if count <= max(2, target.gpus)]
    return [
        simple(
            target,
            *("allreduce", "--backend", backends, "--world-size", ",".join(map(str, ranks))),
            *("--message", "1MB,10MB,100MB,1GB"),
            seconds=60.0 * len(ranks),
            gpus=max(ranks),
        )
    ]


DISTRIBUTED_COMMUNICATION = Problem(
    "distributed_communication_single_node",
    "Distributed communication on a single node",
    (Part("", all_reduce, all_reduce_commands),),
)
