"""The engine of ``ddp``, on Gloo ranks that all tests share."""

import errno
import gzip
import json
import math
import os
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import training_ranks
from training_ranks import largest, measured, outcome_of, worst

from cs336sys.commands.rank_training import communication
from cs336sys.commands.rank_training import measure as measurement
from cs336sys.commands.rank_training.communication import _communication_timeline
from cs336sys.commands.rank_training.measure import kept_ranks, measure_parallel_training, slowest, trace_path
from cs336sys.commands.rank_training.rank import RankMeasurement
from cs336sys.commands.rank_training.verification import verify_training
from cs336sys.errors import CapabilityError, UsageError
from cs336sys.parallel.ranks import launch
from cs336sys.parallel.ranks.spawned import RankError
from cs336sys.parity.rounding import TOLERANCES
from cs336sys.parity.weights import WeightDifference
from cs336sys.results.model import Samples
from cs336sys.run.cells import Worker
from cs336sys.settings.parallel import DATA_PARALLEL_STRATEGIES, ParallelWorkload
from cs336sys.settings.sizes import choose_size
from cs336sys.settings.training import Workload

SIZE = choose_size("tiny", context=16, batch_size=4, vocab_size=500)
SMALL = choose_size("tiny", context=8, batch_size=4, vocab_size=50, d_model=32, d_ff=64, num_heads=2)
PARAMETERS = 652_928
TENSORS = 21


def workload(strategy, **settings):
    """Settings of the ranks or of the training, by their names."""
    options = {
        name: settings.pop(name) for name in ("world_size", "gradient_dtype", "trace", "transport") if name in settings
    }
    bucket_mb = settings.pop("bucket_mb", 0.5) if strategy.startswith("bucketed") else None
    prefetch = 1 if strategy == "fsdp" else None
    training = Workload(**{"size": SIZE, "device": "cpu", "warmup": 1, "steps": 3} | settings)
    return ParallelWorkload(training, strategy, bucket_mb=bucket_mb, prefetch=prefetch, **options)


@pytest.mark.parametrize("strategy", DATA_PARALLEL_STRATEGIES)
def test_every_strategy_trains_the_weights_of_one_process(ranks, strategy):
    differences = ranks().run(verify_training, workload(strategy))
    # Far within the tolerance, which leaves room for deeper models.
    assert largest(differences) < TOLERANCES["fp32"] / 50
    assert all(difference.num_layers == 2 for difference in differences)


def test_as_few_blocks_are_checked_as_asked_for(ranks):
    cells = [replace(workload("bucketed", size=SMALL), check_layers=layers) for layers in (1, 9)]
    assert [ranks().run(verify_training, cell)[0].num_layers for cell in cells] == [1, SMALL.num_layers]
    # Steps without communication are measured once for all.
    assert len({cell.unsynchronized for cell in cells}) == 1


@pytest.mark.parametrize(
    ("strategy", "settings"),
    [("overlap", {"precision": "bf16", "optimizer": "fused"}), ("bucketed", {"gradient_dtype": "bf16"})],
)
def test_lower_precision_moves_weights_by_its_rounding(ranks, strategy, settings):
    differences = ranks().run(verify_training, workload(strategy, **settings))
    assert TOLERANCES["fp32"] < largest(differences) < TOLERANCES["bf16"] / 5


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_gradients_of_fused_blocks_are_averaged_in_the_bf16_that_products_give(ranks):
    settings = {"kernels": "fused", "optimizer": "adamw", "precision": "bf16", "gradient_dtype": "bf16"}
    size = replace(SMALL, num_layers=1, d_model=16, d_ff=16, num_heads=1, context=4, batch_size=2, vocab_size=16)
    cell = workload("bucketed", size=size, **settings)
    for difference, dtypes, alone, sent in ranks().run(training_ranks.half_gradients, cell):
        assert difference.relative < TOLERANCES["bf16"] / 2
        # Those of embeddings and norms are sums in fp32, which are cast on their way.
        assert {name for name, dtype in dtypes.items() if dtype == "float32"} == {
            name for name in dtypes if "embeddings" in name or "ln" in name
        }
        assert alone == dtypes
        assert sent == {"bfloat16", "uint8"}


@pytest.mark.parametrize(
    ("how", "parameter"),
    [
        ("sum", None),
        ("norm left out", "layers.0.ln1.weight"),
        ("head left out", "lm_head.weight"),
        ("stale", None),
        ("nan", "token_embeddings.weight"),
    ],
)
def test_wrong_strategies_are_found(ranks, how, parameter):
    """In the precision with the widest tolerance, and although Adam's steps hardly depend on a gradient's size."""
    differences = ranks().run(training_ranks.verify_broken, workload("overlap", precision="bf16"), how)
    assert largest(differences) > 2 * TOLERANCES["bf16"]
    assert parameter in (None, worst(differences).parameter)


def test_a_cell_with_wrong_weights_is_wrong_and_not_timed(ranks):
    shared = ranks()
    shared.run(training_ranks.break_overlap, "head left out")
    try:
        outcome = outcome_of(workload("overlap"))
    finally:
        shared.run(training_ranks.repair)
    assert outcome.status == "wrong"
    assert outcome.samples == {}
    assert "exposed_ms" not in outcome.derived
    assert outcome.derived["largest_difference"] > 1e-3
    assert outcome.reason.startswith("overlap: after 5 steps lm_head.weight is ")
    assert outcome.reason.endswith("% of how far one process moves it, more than rounding explains (0.1 %)")
    assert outcome_of(workload("overlap")).status == "ok"


@pytest.mark.parametrize("relative", [(math.nan, 0.5), (0.5, math.nan)])
def test_rank_that_compares_nothing_does_not_hide_another(relative):
    differences = [
        WeightDifference(
            largest=value, relative=value, parameter="w", num_layers=1, allowed=0.1, reason="not repeatable"
        )
        for value in relative
    ]
    answers = SimpleNamespace(run=lambda *_: differences)
    derived, outcome = measurement._weights_outcome(answers, workload("naive"))
    assert outcome.status == "wrong"
    assert derived["relative_difference_percent"] == 50
    assert "not repeatable" in derived["notes"]


def test_rounds_are_checked_once_and_each_has_steps_without_communication_of_its_own(ranks, monkeypatch):
    ranks()
    check, checked = measurement._weights_outcome, []
    monkeypatch.setattr(
        measurement, "_weights_outcome", lambda *arguments: checked.append(arguments) or check(*arguments)
    )
    cell = workload("naive", size=SMALL).configuration()
    first, second = (measure_parallel_training(cell | {"round": number}, lambda stage: None) for number in (1, 2))
    assert (first.status, second.status, len(checked)) == ("ok", "ok", 1)
    assert second.derived["relative_difference_percent"] == first.derived["relative_difference_percent"]
    assert second.samples["unsynchronized"] != first.samples["unsynchronized"]


@pytest.mark.parametrize(
    "strategy",
    [*DATA_PARALLEL_STRATEGIES[:4], "none", "optimizer", "optimizer-flat", "context-ring", "context-all-to-all"],
)
def test_replayed_steps_train_the_weights_of_one_process(ranks, strategy):
    shared = workload(strategy, cuda_graph="on", optimizer="fused", size=SMALL)
    assert largest(ranks().run(training_ranks.verify_in_graphs, shared)) < TOLERANCES["fp32"] / 50


def test_torchs_fully_shard_is_captured_as_one_phase(ranks):
    """Captured one by one, its backward pass would wait for events of another graph, the forward pass's."""
    shared = workload("torch-fsdp", cuda_graph="on", optimizer="fused", size=SMALL)
    assert ranks().run(training_ranks.captured_phases, shared) == [["step"], ["step"]]


@pytest.mark.parametrize("strategy", ["bucketed", pytest.param("torch", marks=pytest.mark.nightly)])
def test_compiled_blocks_train_the_same_weights(ranks, strategy):
    results = ranks().run(training_ranks.verify_compiled, workload(strategy, compile="block"))
    assert largest([difference for difference, _ in results]) < TOLERANCES["fp32"]
    # Forward of a block and the loss: a wrapper must not make torch compile more, nor less.
    assert [graphs for _, graphs in results] == [2, 2]


@pytest.mark.parametrize(("strategy", "mesh"), [("fsdp", None), ("fsdp+tensor", "fsdp=2,tp=1")])
def test_no_graph_leaves_a_gather_to_the_next(ranks, strategy, mesh):
    """FSDP gathers ahead for the backward pass: a graph cannot wait for an event of another."""
    training = Workload(choose_size("tiny", num_layers=4, context=8, batch_size=2, vocab_size=101), device="cpu")
    cell = ParallelWorkload(training, strategy, prefetch=1, mesh=mesh)
    for launched, captured, difference in ranks().run(training_ranks.gathers_left_by_phases, cell):
        assert launched["forward"] == ["layers.3"]
        assert not any(captured.values()), captured
        assert difference < 1e-6


def test_uneven_parts_of_a_functional_exchange_are_counted(ranks):
    """As torch's context_parallel sends them, by the name of a group."""
    assert ranks().run(training_ranks.bytes_of_uneven_exchange) == [[12.0], [4.0]]


def test_every_collective_of_a_step_is_recorded_and_can_run_alone(ranks):
    flags = ("allreduce_", TENSORS, "uint8")
    for strategy, calls in {"unsynchronized": 0, "naive": TENSORS, "flat": 1}.items():
        for calls_recorded, untouched in ranks().run(training_ranks.recorded, workload(strategy)):
            assert untouched
            assert calls_recorded[calls:] == ([flags] if calls else [])
            assert [(name, dtype) for name, _, dtype in calls_recorded[:calls]] == calls * [("allreduce_", "float32")]
            # Gradients in a flat buffer start at multiples of 64 elements, and all sizes are such multiples here.
            assert sum(size for _, size, _ in calls_recorded[:calls]) == (4 * PARAMETERS if calls else 0)
    bucketed, _ = ranks().run(training_ranks.recorded, workload("bucketed", bucket_mb=1))[0]
    *buckets, last = bucketed
    assert last == flags
    assert {name for name, _, _ in buckets} <= {"allreduce_", "allreduce_coalesced_"}
    assert sum(size for _, size, _ in buckets) == 4 * PARAMETERS
    assert all(size <= 1_000_000 for _, size, _ in buckets)
    halved, _ = ranks().run(training_ranks.recorded, workload("flat", gradient_dtype="bf16"))[0]
    assert halved == [("allreduce_", 2 * PARAMETERS, "bfloat16"), flags]
    of_torch, _ = ranks().run(training_ranks.recorded, workload("torch"))[0]
    assert sum(size for name, size, _ in of_torch if name == "allreduce_") == 4 * PARAMETERS


def test_collectives_that_waited_at_once_run_alone_without_waiting(ranks):
    """NCCL returns a null pointer from those: to wait for that crashed ``shard --strategy torch-fsdp``."""
    launched, alone = ranks().run(training_ranks.replayed_synchronous)[0]
    assert [is_asynchronous for _, is_asynchronous in launched] == 7 * [False]
    assert alone == [(name, True) for name, _ in launched]


def test_communication_at_once_is_done_when_it_is_launched(ranks):
    """A collective that was under way when torch.profiler ended corrupted the heap: 1 run in 16 died of SIGSEGV."""
    assert ranks().run(training_ranks.done_when_launched) == [True, True]


def test_torch_sends_no_bf16_on_a_cpu(ranks):
    with pytest.raises(
        CapabilityError, match="strategy 'torch': torch's DDP sends gradients in bf16 only through NCCL"
    ):
        ranks().run(verify_training, workload("torch", gradient_dtype="bf16"))


def test_timeline_counts_unions_of_intervals():
    compute = [(1_000_000, 3_000_000), (2_000_000, 4_000_000), (10_000_000, 11_000_000)]
    communicate = [(3_500_000, 9_000_000), (3_600_000, 5_000_000), (10_500_000, 10_600_000)]
    timeline = _communication_timeline(compute, communicate, {"forward": 2.0})
    assert timeline.compute == [(0.0, 3.0), (9.0, 10.0)]
    assert timeline.communicate == [(2.5, 8.0), (9.5, 9.6)]
    assert (timeline.compute_ms, timeline.communication_ms) == (4.0, pytest.approx(5.6))
    assert timeline.overlap_ms == pytest.approx(0.6)
    # Two pieces a 10000th of the step apart are one in the picture, and two in the sum.
    close = _communication_timeline([(0, 1_000_000), (1_000_200, 2_000_000)], [], {})
    assert close.compute == [(0.0, 2.0)]
    assert close.compute_ms == pytest.approx(1.9998)


def test_a_cell_has_what_its_columns_need(ranks, tmp_path, monkeypatch):
    ranks()
    monkeypatch.setattr(measurement, "_unsynchronized", {})
    monkeypatch.setattr(measurement, "_links", {})
    stages = []
    cell = workload("bucketed", trace=str(tmp_path))
    outcome = measure_parallel_training(cell.configuration(), stages.append)
    assert outcome.status == "ok"
    samples, derived = outcome.samples, outcome.derived
    assert stages == [
        "checking bucketed against one process",
        "timing steps without communication",
        "timing bucketed",
        "timing all-reduces",
    ]
    phases = {"forward", "backward", "synchronize", "optimizer"}
    assert set(samples) == phases | {"step", "wall", "unsynchronized", "communication"}
    assert {len(samples[name].measured) for name in samples} == {3}
    assert derived["exposed_ms"] == samples["step"].median - samples["unsynchronized"].median
    assert derived["communicated_bytes"] == 4 * PARAMETERS + TENSORS
    assert derived["calls"] == derived["gradient_calls"] + 1
    assert derived["gradient_calls"] >= 4 * PARAMETERS / 500_000
    assert derived["tokens_per_s"] == pytest.approx(4 * 16 / samples["step"].mean * 1e3)
    assert derived["link_latency_s"] >= 0 < derived["link_bytes_per_s"]
    json.dumps(asdict(outcome))

    (trace,) = tmp_path.iterdir()
    assert trace.name.startswith("tiny_context16_batch4_fp32_off_reference_course_world2_gradients-fp32_bucketed_0.5mb")
    names = {event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert phases | {"launch bucket 0", f"launch bucket {derived['gradient_calls'] - 1}"} <= names

    # Steps without communication serve all strategies.
    measure_parallel_training(workload("torch").configuration(), stages.append)
    assert stages[4:] == ["checking torch against one process", "timing torch"]


def test_a_trace_that_cannot_be_written_leaves_that_of_before(tmp_path, monkeypatch):
    path = tmp_path / "trace.json.gz"
    path.write_text("of before")

    def write_half(profiler, file):
        assert file.endswith(".json.gz"), "torch compresses by the name"
        Path(file).write_text("of n")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(communication.TorchProfiler, "export_chrome_trace", write_half)
    monkeypatch.setattr(communication, "finish_communication", lambda: None)
    with pytest.raises(OSError, match="No space left"):
        communication.write_trace({}, torch.device("cpu"), path)
    assert path.read_text() == "of before"
    assert list(tmp_path.iterdir()) == [path]


def test_no_cell_writes_over_the_trace_of_another(tmp_path):
    """Those of meshes, of seeds, of a board and of the same cell of ``shard`` had one name, and the last was kept."""
    training = {"tf32": True, "seed": 1, "synchronize": "none", "warmup": 7, "steps": 9}
    training |= {"state_dtype": "bf16", "size": replace(SIZE, d_ff=96), "precision": "bf16", "optimizer": "fused"}
    parallel = {"transport": "copy-engines", "backend": "gloo", "check_layers": 1}
    cells = [workload("bucketed", trace=str(tmp_path), optimizer="adamw").configuration()]
    cells += [cells[0] | change for change in ({"board": True}, {"round": 2})]
    for mesh in ("fsdp=2,tp=2", "fsdp=1,tp=4"):
        of_both = ParallelWorkload(Workload(SIZE), "fsdp+tensor", 4, prefetch=1, mesh=mesh, trace=str(tmp_path))
        cells.append(of_both.configuration())
    cells += [cells[0] | {"device": "auto", name: value} for name, value in parallel.items()]
    for name, value in training.items():
        changed = workload("bucketed", trace=str(tmp_path), **{"optimizer": "adamw", name: value}).configuration()
        cells.append(changed)
    paths = [trace_path(cell) for cell in cells]
    assert len(set(paths)) == len(cells) == 5 + len(training) + len(parallel)
    assert trace_path(cells[0] | {"timeout_s": 9.0}) == paths[0]


def test_ranks_of_nccl_expect_no_collective_beside_a_graph(monkeypatch):
    """Unless the environment has decided."""
    monkeypatch.setattr(measurement, "_backend", lambda workload: workload.backend)
    monkeypatch.setattr(measurement.launch, "kept", lambda *_, **__: os.environ.get("NCCL_GRAPH_MIXING_SUPPORT"))
    for backend, setting, expected in (("nccl", None, "0"), ("nccl", "1", "1"), ("gloo", None, None)):
        with monkeypatch.context() as patched:
            patched.setattr(os, "environ", {} if setting is None else {"NCCL_GRAPH_MIXING_SUPPORT": setting})
            assert kept_ranks(ParallelWorkload(Workload(SIZE), "naive", backend=backend)) == expected


@pytest.mark.multigpu
def test_gpus_compute_while_parameters_arrive_in_graphs():
    """With an event before each gather GPUs ran out of queues: computing waited for gathers that it did not need."""
    size = choose_size("xl", num_layers=24, batch_size=4, context=512)
    settings = {"size": size, "precision": "bf16", "attention": "flash", "optimizer": "fused", "device": "cuda"}
    cell = replace(workload("optimizer-flat", cuda_graph="on", warmup=2, steps=5, **settings), check_layers=1)
    outcome = measured(cell)
    assert outcome.derived["overlap_percent"] > 75


@pytest.mark.multigpu
def test_torchs_fully_shard_is_captured_whole():
    cell = workload("torch-fsdp", size=SMALL, optimizer="fused", device="cuda", cuda_graph="on")
    outcome = measured(cell)
    assert outcome.samples["step"].measured


@pytest.mark.multigpu
def test_a_replayed_step_is_over_when_it_returns():
    cell = workload("bucketed", size=SMALL, optimizer="fused", device="cuda", cuda_graph="on", bucket_mb="block")
    assert launch.run(training_ranks.is_over_after_replays, cell, world_size=2, backend="nccl", timeout_s=120) == [
        True,
        True,
    ]


def test_ranks_end_with_the_process_that_measures():
    """Which would otherwise wait for them at its end, until it is killed."""
    worker = Worker("training_ranks:measure_with_a_kept_rank")
    assert worker.measure({}, timeout_s=None, progress=lambda stage: None).status == "ok"
    process = worker._child.guarded.process
    worker.close()
    assert process.returncode == 0


def test_the_slowest_rank_counts_with_its_phases():
    def of_rank(forward, backward, wall):
        times = {"forward": forward, "backward": backward, "step": list(map(sum, zip(forward, backward, strict=True)))}
        samples = {
            name: Samples("ms", "cpu clock", measured=tuple(series[1:]), warmup=tuple(series[:1]))
            for name, series in (times | {"wall": wall}).items()
        }
        return RankMeasurement(samples, None, 0, 0, 0, None)

    # In the last step the first rank waits for the second one in its backward pass.
    series = slowest(
        [
            of_rank([5.0, 1.0, 1.0], [4.0, 1.0, 5.0], [9.0, 3.0, 7.0]),
            of_rank([4.0, 1.0, 4.0], [4.0, 2.0, 1.0], [8.0, 4.0, 6.0]),
        ]
    )
    assert (series["step"].warmup, series["step"].measured) == ((9.0,), (3.0, 6.0))
    assert (series["forward"].measured, series["backward"].measured) == ((1.0, 1.0), (2.0, 5.0))
    assert series["wall"].measured == (4.0, 7.0)
    assert series["step"].method == "cpu clock, maximum over ranks"


@pytest.mark.multigpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "strategy",
    [*DATA_PARALLEL_STRATEGIES, "none", "optimizer", "optimizer-flat", "fsdp"],
    ids=lambda strategy: strategy,
)
def test_gpus_replay_what_one_process_launches(strategy, precision):
    """Weights are compared before anything is timed; communication is captured where it can overlap."""
    size = choose_size("small", num_layers=4, batch_size=4, context=256)
    settings = {"size": size, "precision": precision, "optimizer": "fused", "device": "cuda", "cuda_graph": "on"}
    settings |= {"warmup": 2, "steps": 5} | ({"bucket_mb": "block"} if strategy.startswith("bucketed") else {})
    outcome = outcome_of(workload(strategy, **settings))
    assert (outcome.status, outcome.reason) == ("ok", None)
    assert outcome.derived["timeline"]["communicate"]
    # After the backward pass it is 0.0; beside it most, but where other processes have the GPUs in turn (12 was seen).
    if strategy in ("overlap", "bucketed"):
        assert outcome.derived["overlap_percent"] > 5
    assert outcome.derived["calls"] > 0


@pytest.mark.multigpu
@pytest.mark.parametrize("gradients", ["fp32", "bf16"])
@pytest.mark.parametrize("cuda_graph", ["on", "off"])
def test_copy_engines_send_what_collectives_would(cuda_graph, gradients):
    size = choose_size("small", num_layers=8, batch_size=4, context=256)
    settings = {"size": size, "precision": "bf16", "device": "cuda", "warmup": 2, "steps": 5, "cuda_graph": cuda_graph}
    settings |= {"kernels": "fused", "attention": "flash", "optimizer": "adamw"}
    settings |= {"bucket_mb": "block", "gradient_dtype": gradients}
    derived = {}
    for transport in ("copy-engines", "collectives"):
        cell = workload("bucketed", **settings, transport=transport)
        outcome = measured(cell)
        assert outcome.derived["timeline"]["communicate"]
        assert ("communication" in outcome.samples) == (transport == "collectives")
        derived[transport] = outcome.derived
    for name in ("calls", "communicated_bytes"):
        assert derived["copy-engines"][name] == derived["collectives"][name]


@pytest.mark.multigpu
def test_a_rank_that_dies_between_replays_ends_the_run():
    """The other waits in a graph, of whose collectives no watchdog knows."""
    size = choose_size("small", num_layers=2, batch_size=4, context=256)
    cell = workload("bucketed", size=size, optimizer="fused", device="cuda", cuda_graph="on", bucket_mb="block")
    with pytest.raises(RankError) as caught:
        launch.run(training_ranks.killed_between_replays, cell, world_size=2, backend="nccl", timeout_s=3600)
    assert caught.value.rank == 1


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"strategy": "ring"}, "unknown strategy 'ring': choose from naive, flat, overlap, bucketed, torch"),
        ({"strategy": "bucketed"}, "--bucket-mb: strategy 'bucketed' needs one"),
        ({"strategy": "fsdp"}, "--prefetch: strategy 'fsdp' needs one"),
        ({"training": Workload(SIZE, mode="forward")}, "mode 'forward': ranks that share a batch can only train"),
    ],
)
def test_workloads_that_no_command_asks_for_are_refused(settings, sentence):
    """Those that a command may ask for are in test_refusals.py."""
    with pytest.raises(UsageError, match=sentence):
        ParallelWorkload(**{"training": Workload(SIZE, device="cpu"), "strategy": "naive"} | settings)
