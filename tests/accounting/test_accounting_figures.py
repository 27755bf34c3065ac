"""Every figure of small cases, written down in ``figures.txt`` (tests/written_figures.py).

Other tests hold the formulas to what torch allocates, sends and counts. They see sums; here each term has its place,
of a model whose dimensions share few factors, with rates that all differ.
"""

# Further names are used in figures.txt.
# ruff: noqa: F401

import math
from dataclasses import fields, replace

from written_figures import figures_test, outcome

import cs336sys.accounting.checkpointing
from cs336sys.accounting import (
    activations,
    communication,
    flops,
    fused,
    hardware,
    memory,
    one_device,
    parallelism,
    scaling,
    xxl,
)
from cs336sys.accounting.sharding import cells, context, fsdp, partition, selective_checkpointing, step, tensor
from cs336sys.accounting.step_time import choice, prediction, rates, work
from cs336sys.accounting.step_time import memory as step_memory
from cs336sys.settings.parallel import ParallelWorkload
from cs336sys.settings.sizes import SIZES, ModelSize
from cs336sys.settings.strategies import STRATEGIES
from cs336sys.settings.training import Workload

checkpoints = cs336sys.accounting.checkpointing
HAND = ModelSize("hand", d_model=30, d_ff=70, num_layers=5, num_heads=6, vocab_size=110, context=14, batch_size=4)
LAYER = parallelism.Layer(64, 4, 8, 100, 10)
# Of every term another number of seconds, and launches as long as most of its work.
RATES = rates.Rates(
    gpu="NVIDIA H200",
    seconds={term: (3 + position) * 1e-9 for position, term in enumerate(work.TERMS)},
    launch_s=1e-7,
    usual_launch_s=2e-7,
    exposures={"bucketed": rates.Exposure(1e9, 0.25, 0.125), "fsdp": rates.Exposure(2e9, 0.5)},
    ranges={
        name: (1, most)
        for name, most in (
            ("d_model", 30), ("tokens", 56), ("context", 14), ("head_dim", 5), ("vocab_size", 110), ("ranks", 2)
        )
    },
    kinds=("fp32, eager, scores", "half, fused, flash", "half, eager, flash"),
)  # fmt: skip


COUNTED = work.CountedModel(
    parameters=1000,
    tensors=7,
    forward=work.CountedPass((((2, 3, 5), (7, 1, 4)), ((4, 3, 5), (7, 1, 9))), (100.0, 160.0), 9),
    backward=work.CountedPass((((2, 3, 5),), ((4, 3, 5),)), (300.0, 410.0), 17),
    attention=((3, 7, 5), (2, 11, 4)),
    peaks={"none": (9000.0, 9500.0), "block": (8000.0, 8100.0)},
)


def training(size=HAND, device="cpu", **settings):
    return Workload(size, device=device, **settings)


def configuration(checkpointing="none", accumulation=1, strategy=None, ranks=1, sent="fp32", **settings):
    return prediction.StepConfiguration(training(**settings), checkpointing, accumulation, strategy, ranks, sent)


def sharded(strategy, ranks=2, precision="bf16", attention="reference", size=HAND, **settings):
    return step.ShardedStep(strategy, size, ranks, precision, attention, **settings)


def parallel(strategy, ranks=2, checkpointing="none", mesh=None, prefetch=None, keep_gathered=0, **settings):
    prefetch = prefetch or (1 if STRATEGIES[strategy].gathers_ahead else None)
    return ParallelWorkload(
        training(**settings), strategy, ranks, checkpointing=checkpointing, mesh=mesh, prefetch=prefetch,
        keep_gathered=keep_gathered,
    )  # fmt: skip


def simulate(mesh, accumulation=1, checkpointing="none", dtypes=("bf16", "bf16", "bf16"), slowdown=(1.0, 1.0)):
    """Simulate a step on two devices a node, whose links are slow enough to show."""
    slow = hardware.OverlapSlowdown(*slowdown)
    cluster = hardware.Cluster(4, 1e8, 3e7, 1e-5, 1e6, ((2, 2e8),), slow)
    device = scaling.DeviceTime(1e-3, 7e-4)
    size = replace(HAND, batch_size=8)
    simulation = scaling.Simulation(size, scaling.Dtypes(*dtypes), cluster, device, checkpointing)
    simulated = simulation.step(partition.Mesh(*mesh), accumulation)
    return {**simulated.parts_s, "bytes": simulated.memory, "FLOP/s": simulation.flops_per_s(simulated)}


def kept(precision="bf16", ranks=2, blocks=0, **settings):
    return step.ShardedStep("fsdp", HAND, ranks, precision, "flash", f"keep={blocks}", **settings)


def fields_of_kept(step):
    """Return what a step keeps, and what that depends on."""
    names = ("size", "world_size", "precision", "state_dtype", "kept_blocks", "prefetch", "keep_gathered")
    return tuple(getattr(step, name) for name in names)


def choose_kept(step, limit_bytes, **settings):
    """Return the chosen step's fields."""
    return fields_of_kept(selective_checkpointing.choose_kept_blocks(step, limit_bytes, **settings))


# One for each rule, and then neighbours that can run.
_FUSED_FSDP = {"strategy": "fsdp", "ranks": 2, "kernels": "fused", "attention": "flash", "optimizer": "fused"}
_OURS = {"kernels": "fused", "precision": "bf16", "optimizer": "adamw"}
CONFIGURATIONS = [
    configuration(*arguments, **settings)
    for arguments, settings in (
        ((), {"cuda_graph": "on"}),
        ((), {"cuda_graph": "on", "optimizer": "fused", "compile": "model"}),
        ((), {"kernels": "fused", "compile": "model"}),
        (("block",), {"compile": "model"}),
        (("sublayer",), {"compile": "block"}),
        (("ffn",), {"kernels": "rope"}),
        (("keep=6",), _FUSED_FSDP),
        (("keep=2",), {}),
        (("keep=2",), {**_FUSED_FSDP, "attention": "reference"}),
        (("keep=2",), {**_FUSED_FSDP, "compile": "block"}),
        (("every=2",), {"strategy": "bucketed", "ranks": 2}),
        (("none", 2), {"cuda_graph": "on", "optimizer": "fused"}),
        (("none", 2), {"strategy": "fsdp", "ranks": 2}),
        ((), {**_OURS, "state_dtype": "split", "strategy": "bucketed", "ranks": 2}),
        ((), {"strategy": "optimizer", "ranks": 2, "optimizer": "adamw"}),
        ((), {"cuda_graph": "on", "optimizer": "fused"}),
        ((), {"compile": "model"}),
        (("block",), {"compile": "block", "strategy": "bucketed", "ranks": 2}),
        (("sublayer", 2), {}),
        (("keep=5",), _FUSED_FSDP),
        (("every=2",), {}),
        (("none", 2), {"strategy": "bucketed", "ranks": 2}),
        (("none", 2), {"strategy": "fsdp"}),
        ((), {**_OURS, "state_dtype": "split", "strategy": "fsdp", "ranks": 2}),
        ((), {**_OURS, "state_dtype": "split"}),
        ((), {"strategy": "optimizer", "ranks": 2, "optimizer": "fused"}),
        ((), {"strategy": "fsdp", "ranks": 2, "optimizer": "adamw"}),
    )
]


# Seconds of a step and bytes, the fastest first.
CANDIDATES = [
    choice.Candidate(
        configuration(), prediction.StepTime(None, {}, {"forward": step_s / 2}, {"forward": 0.1}, 0, 0, step_s), size
    )
    for step_s, size in ((1.0, 9.0), (2.0, 8.0), (3.0, 7.0), (4.0, 7.5), (5.0, 6.0), (6.0, 5.0), (7.0, 5.0))
]


def moments(peaks):
    """Return parameters and state, which are the same all the time, and gradients and activations of each moment."""
    ((parameters, state),) = {(peak.parameters, peak.optimizer_state) for peak in peaks}
    of_moments = {peak.moment: (peak.gradients, peak.activations) for peak in peaks}
    return {"parameters, state": (parameters, state), **of_moments}


def terms(done):
    """Return the work of each phase, and the launches."""
    return {**done.phases, "launches": done.launches}


def recomputed(checkpointing, attention="flash", precision="bf16"):
    """Return what checkpoints add to the backward pass."""
    workload = training(precision=precision, attention=attention)
    added, before = (work.step_work(workload, name).backward for name in (checkpointing, "none"))
    return {term: amount - before[term] for term, amount in added.items() if amount != before[term]}


def predicted(settings, **arguments):
    """Return the figures of a predicted time; its work has rows of its own."""
    time = prediction.predict_step(settings, RATES, **arguments)
    named = {field.name: getattr(time, field.name) for field in fields(time) if field.name not in ("work", "terms_s")}
    return {**named, "terms_s": [time.terms_s.get(term, 0.0) for term in work.TERMS], "gpu_s": time.gpu_s}


def held(settings):
    """Return the widest moment of a step, and what the allocator adds."""
    moments = step_memory.step_moments(settings)
    if settings.accumulation > 1:
        gradients = max(moment.gradients for moment in moments)
        moments = [replace(moment, gradients=gradients) for moment in moments]
    widest = max(moments, key=lambda moment: moment.total)
    return widest, step_memory.step_peak_bytes(settings) - widest.total


test_figures_are_those_written_down = figures_test(globals())
