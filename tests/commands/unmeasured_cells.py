"""Cells that were never measured, for the tables and pictures that commands make of them."""

from dataclasses import replace

from cs336sys.accounting.memory import GIB
from cs336sys.capture.summary import KernelTime, Profile, RangeTime
from cs336sys.results.model import Cell, Samples
from cs336sys.settings.operations import CollectiveWorkload
from cs336sys.settings.parallel import ParallelWorkload
from cs336sys.settings.profiling import ProfileWorkload
from cs336sys.settings.sizes import choose_size
from cs336sys.settings.training import Workload


def samples(*values, unit="ms", method="cuda events"):
    return Samples(unit, method, values)


def in_rounds(*cells):
    return [configured(cell, round=number) for number, cell in enumerate(cells, start=1)]


def configured(cell, **settings):
    return replace(cell, configuration=cell.configuration | settings)


def derived(cell, **values):
    return replace(cell, derived=cell.derived | values)


def attn_cell(context, status, held_gib=None):
    shape = {"batch_size": 8, "heads": 1, "context": context, "head_dim": 64, "dtype": "fp32", "causal": True}
    configuration = {"implementation": "eager", **shape, "device": "cuda", "seed": 0, "warmup": 1, "steps": 2}
    measured = {"forward": samples(1.0, 2.0)} if status == "ok" else {}
    memory = {"held_gib": held_gib, "peak_gib": held_gib} if measured else {}
    return Cell("attn", configuration, status, measured, memory)


def in_parts(milliseconds):
    """Samples of a forward pass, of a backward pass that takes twice as long, and of both."""
    parts = {"forward": milliseconds, "backward": 2 * milliseconds, "end_to_end": 3 * milliseconds}
    return {part: samples(ms, ms, 9 * ms, method="triton do_bench") for part, ms in parts.items()}


def flash_cell(name, milliseconds, context=1024, status="ok", **more):
    shape = {"batch_size": 1, "heads": 16, "context": context, "head_dim": 64, "dtype": "bf16", "causal": True}
    configuration = {"implementation": name, **shape, "device": "cuda", "seed": 0}
    if status != "ok":
        more = {"derived": {"out_error": 0.5}, "reason": "relative error over 0.02: out by 5.0e-01"} | more
        return Cell("flash", configuration, status, {}, **more)
    parts = in_parts(milliseconds)
    rates = {f"{part}_tflops": 1 / series.measured[0] for part, series in parts.items()}
    return Cell("flash", configuration, "ok", parts, rates | {"out_error": 1e-3} | more)


def kernel_cell(implementation, milliseconds, status="ok", op="swiglu", **errors):
    configuration = {"op": op, "implementation": implementation, "tokens": 8, "width": 4, "dtype": "bf16"}
    if status != "ok":
        return Cell("kernels", configuration, status, {}, errors, "relative error over 0.016: out by nan")
    parts = in_parts(milliseconds)
    rates = {f"{part}_gbps": 1 / series.measured[0] for part, series in parts.items()}
    rates |= {f"{part}_copy_percent": 50.0 for part in parts} | {"copy_gbps": 4000.0}
    return Cell("kernels", configuration, status, parts, rates | errors)


# No copy can be as fast as what moves nothing, and an optimizer's step is one part.
PRODUCT = kernel_cell("chunked", 1.0, op="linear-cross-entropy")
KERNEL_CELLS = [
    kernel_cell("ours", 1.0, out_error=1e-3, dgate_error=2e-3),
    kernel_cell("eager", 4.0),
    kernel_cell("liger", 1.0, "wrong", out_error=float("nan"), dgate_error=2e-3),
    kernel_cell("ours", 2.0, op="rope"),
    replace(
        PRODUCT,
        samples={"end_to_end": PRODUCT.samples["end_to_end"]},
        derived={"end_to_end_tflops": 7.0, "copy_gbps": None},
    ),
]


def collective_cell(message_bytes, time_us, world_size=2, backend="nccl", collective="all_reduce", status="ok"):
    configuration = CollectiveWorkload(backend, collective, world_size, "fp32", message_bytes).configuration()
    if status != "ok":
        return Cell("allreduce", configuration, status, reason="none here")
    bandwidth = message_bytes / time_us / 1e3
    facts = {"size_bytes": message_bytes, "elements": message_bytes // 4, "in_place": True, "link": "NV18"}
    facts |= {"wrong_elements": 0}
    for timing in ("back_to_back", "synchronized"):
        facts |= {f"{timing}_algbw_gbps": bandwidth, f"{timing}_busbw_gbps": bandwidth if world_size > 1 else None}
    series = samples(*(time_us,) * 3, unit="us")
    return Cell("allreduce", configuration, "ok", {"back_to_back": series, "synchronized": series}, facts)


# 20 us and 300 GB/s on two ranks of NCCL; 1 ms and 1 GB/s on Gloo.
COLLECTIVES = [collective_cell(size, 20 + size / 300e3) for size in (10**6, 10**9, 10**7)]
COLLECTIVES += [collective_cell(size, 1000 + size / 1e3, 4, "gloo") for size in (10**6, 10**7)]
COLLECTIVES += [collective_cell(10**6, 50.0, 4), collective_cell(10**6, 0, 8, status="unsupported")]

PHASES = ("forward", "backward", "optimizer", "wall", "communication")
TIMELINE = {
    "compute": [(0.0, 50.0), (60.0, 70.0)],
    "communicate": [(40.0, 60.0)],
    "phases": {"forward": 20.0, "backward": 50.0, "synchronize": 60.0, "optimizer": 70.0},
    "compute_ms": 60.0,
    "communication_ms": 20.0,
    "overlap_ms": 10.0,
}


def ddp_cell(strategy, step_ms, bucket_mb=None, precision="bf16", status="ok", reason=None, buckets=1, **more):
    workload = ParallelWorkload(Workload(choose_size("xl"), precision=precision), strategy, bucket_mb=bucket_mb)
    if status != "ok":
        return Cell("ddp", workload.configuration(), status, derived=more, reason=reason)
    steps = (step_ms - 2, step_ms, step_ms, step_ms, step_ms + 1)
    series = {"step": samples(*steps), "unsynchronized": samples(*[80.0] * 5)}
    facts = {
        "exposed_ms": step_ms - 80,
        "exposed_percent": 100 * (step_ms - 80) / step_ms,
        "hidden_percent": 60.0,
        "overlap_percent": 50.0,
        "calls": buckets + 1,
        "gradient_calls": buckets,
        "communicated_bytes": 8_000_000_000,
        "peak_gib": 50.0,
        "tokens_per_s": 20_000.0,
        "largest_difference": 1.5e-7,
        "relative_difference_percent": 0.5,
        "checked_layers": 48,
        "timeline": TIMELINE,
        "link_latency_s": 20e-6,
        "link_bytes_per_s": 320e9,
    }
    series |= {name: samples(1.0, 1.0, 1.0) for name in PHASES}
    return Cell("ddp", workload.configuration(), "ok", series, facts | more)


DDP_CELLS = [
    ddp_cell("naive", 120.0, buckets=435),
    ddp_cell("bucketed", 96.0, bucket_mb=1000.0, buckets=8),
    ddp_cell("bucketed", 90.0, bucket_mb=100.0, buckets=80),
    ddp_cell("flat", 0.0, status="wrong", reason="flat: off", largest_difference=0.3, relative_difference_percent=80.0),
    ddp_cell("naive", 240.0, precision="fp32", checked_layers=24),
    ddp_cell("torch", 0.0, precision="fp32", status="oom", reason="out of memory"),
]
# To and fro.
DDP_ROUNDS = [
    *(configured(cell, round=1) for cell in (ddp_cell("naive", 120.0), ddp_cell("flat", 100.0, peak_gib=49.0))),
    *(configured(cell, round=2) for cell in (ddp_cell("flat", 90.0, peak_gib=51.0), ddp_cell("naive", 130.0))),
]


def not_hidden(**more):
    """436 all-reduces that took 61 ms alone, and 35 of 86 ms in a graph, beside nothing."""
    naive = ddp_cell("naive", 116.0, **{"timeline": TIMELINE | {"communication_ms": 34.9, "overlap_ms": 0.0}} | more)
    return replace(naive, samples=naive.samples | {"communication": samples(61.5, 61.5, 61.5)})


def rank_cell(strategy, ranks, batch, step_ms, status="ok", command="shard", attention="flash"):
    training = Workload(replace(choose_size("tiny"), batch_size=batch), attention=attention)
    bucket, prefetch = (1.0 if strategy == "bucketed" else None), (1 if strategy == "fsdp" else None)
    workload = ParallelWorkload(training, strategy, ranks, prefetch=prefetch, bucket_mb=bucket)
    series = {name: samples(*(step_ms,) * 6) for name in ("step", "synchronize", *PHASES)}
    series["unsynchronized"] = samples(*(0.8 * step_ms,) * 6)
    facts = {"tokens_per_s": batch * training.size.context / step_ms * 1e3, "peak_gib": 10.0 / ranks}
    facts |= {"gathers": [], "timeline": None, "hidden_percent": None, "checked_layers": 2, "gradient_calls": 1}
    facts |= {"communicated_bytes": 1e6, "link_latency_s": 1e-5, "link_bytes_per_s": 1e9}
    if command == "shard":
        memory = {"parameters": 0, "gradients": 0, "optimizer_state": 0, "rest": GIB}
        facts["memory"] = [{"moment": "peak", **memory}]
    return Cell(command, workload.configuration(), status, series if status == "ok" else {}, facts)


RANK_CELLS = [
    rank_cell("none", 1, 4, 100.0),
    rank_cell("none", 1, 8, 190.0),
    rank_cell("fsdp", 2, 4, 62.5),
    rank_cell("fsdp", 2, 8, 110.0),
    rank_cell("fsdp", 4, 8, 50.0),
    rank_cell("fsdp", 4, 16, 100.0, "oom"),
]
ALONE = rank_cell("fsdp", 1, 4, 125.0)
CONTEXT_CELLS = [
    rank_cell("none", 1, 2, 100.0),
    rank_cell("context-ring", 1, 2, 110.0),
    rank_cell("context-ring", 2, 2, 55.0),
    rank_cell("context-all-to-all", 2, 2, 50.0),
    rank_cell("context-all-to-all", 2, 2, 40.0, attention="sdpa"),
]


def of_board(ranks, peaks):
    return derived(rank_cell("fsdp", ranks, 8, 80.0 / ranks), peak_gib=None, memory=[], peaks_gib=peaks)


def range_time(name, busy_ms, kernels=10, count=3):
    """``count`` ranges, in each of which kernels run one after another for ``busy_ms``."""
    busy_ns = round(busy_ms * count * 1e6)
    return RangeTime(name, count, busy_ns + 9, kernels * count, busy_ns, busy_ns, busy_ns + 3)


def profiled(precision="fp32", busy=(8.0, 16.0), step_ms=30.0, compile="off", profiler="auto", **changes):
    """A cell whose forward pass takes 10 ms without a profiler and whose backward pass takes 20."""
    size = choose_size("small", context=256)
    training = Workload(size, precision=precision, compile=compile, mode="forward-backward", device="cuda")
    parts = {"computing attention scores": 0.5, "computing softmax": 1.0, "final matmul": 0.25}
    profile = Profile(
        profiler="Nsight Systems",
        is_gpu=True,
        phases=(range_time("forward", busy[0]), range_time("backward", busy[1], kernels=20)),
        step=range_time("step", sum(busy), kernels=30),
        parts=tuple(range_time(name, busy_ms, count=36) for name, busy_ms in parts.items()),
        kernels=(KernelTime("forward", "nvjet_hsh_128x256", 15, round(busy[0] * 3e6), 1.0, 1, 1),),
        part_kernels=(),
        attributed_percent=99.5,
        configuration=training.configuration(),
    )
    times = {"forward": 10.0, "backward": 20.0, "step": step_ms, "annotated": step_ms + 0.2}
    facts = {"profiler": "Nsight Systems 2025.3.1", "profiler_reason": None}
    facts["profile"] = replace(profile, **changes).to_json()
    series = {name: samples(*(ms,) * 3) for name, ms in times.items()}
    return Cell("nsys", ProfileWorkload(training, profiler).configuration(), "ok", series, facts)
