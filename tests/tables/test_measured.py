"""Rates of a machine and its steps beside the model, from saved results."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cs336sys.accounting.flops import count_parameters, model_flops
from cs336sys.commands.account.rates import (
    compare_with_measured,
    measured_bandwidth,
    measured_call,
    measured_device_time,
    measured_flops,
    measured_ranks,
    measured_slowdown,
    read_measured,
)
from cs336sys.errors import UsageError
from cs336sys.results.model import Cell, Samples
from cs336sys.settings.parallel import ParallelWorkload
from cs336sys.settings.sizes import SIZES
from cs336sys.settings.training import Workload

TRAINING = Workload(SIZES["small"], precision="bf16")


def ms(*values):
    return Samples("ms", "cuda events", values)


def bench_cell(tflops=200.0, forward_ms=10.0, optimizer_ms=5.0, **settings):
    samples = {"forward": ms(forward_ms), "backward": ms(20.0), "optimizer": ms(optimizer_ms)}
    return Cell("bench", replace(TRAINING, **settings).configuration(), "ok", samples, {"tflops": tflops})


def collective(message_bytes, us, busbw, backend="nccl", ranks=2):
    settings = {"collective": "all_reduce", "backend": backend, "message_bytes": message_bytes, "world_size": ranks}
    samples = {"back_to_back": Samples("us", "cuda events", (us,))}
    return Cell("allreduce", settings, "ok", samples, {"back_to_back_busbw_gbps": busbw})


def ddp_cell(step_ms, alone_ms=40.0, communication_ms=10.0):
    workload = ParallelWorkload(TRAINING, "naive", 2)
    samples = {"step": ms(step_ms), "unsynchronized": ms(alone_ms), "communication": ms(communication_ms)}
    return Cell("ddp", workload.configuration(), "ok", samples, {"communicated_bytes": 2_000_000_000})


RATES = (bench_cell(), collective(1000, 50.0, 0.1), collective(10**9, 5000.0, 200.0))


def test_rates_come_from_the_best_step_and_the_largest_message():
    cells = [bench_cell(150.0), *RATES, collective(10**9, 9e5, 1.0, backend="gloo", ranks=4)]
    assert measured_flops(cells, "bf16").value == 200e12
    assert measured_bandwidth(cells).value == 200e9
    assert measured_call(cells).value == 50e-6
    assert measured_call([bench_cell()]).value == 0
    assert measured_bandwidth(cells[-1:]).value == 1e9
    with pytest.raises(UsageError, match="no step in fp32"):
        measured_flops(cells, "fp32")
    with pytest.raises(UsageError, match="no all-reduce"):
        measured_bandwidth([bench_cell()])


def test_the_time_of_a_device_is_its_own_or_by_flops_and_parameters():
    cells = [bench_cell(forward_ms=12.0), bench_cell()]
    time, source = measured_device_time(cells, SIZES["small"], "bf16")
    assert time.sequence_s == pytest.approx(30e-3 / 4)
    assert time.optimizer_s == pytest.approx(5e-3)
    assert "by FLOPs" not in source
    other, source = measured_device_time(cells, SIZES["medium"], "bf16")
    assert other.sequence_s * 4 == pytest.approx(30e-3 * model_flops(SIZES["medium"]) / model_flops(SIZES["small"]))
    parameters = count_parameters(SIZES["medium"]) / count_parameters(SIZES["small"])
    assert other.optimizer_s == pytest.approx(5e-3 * parameters)
    assert "by FLOPs and parameters" in source


def test_the_state_asked_for_is_that_of_the_optimizers_time():
    half = {"kernels": "fused", "optimizer": "adamw", "state_dtype": "bf16"}
    # The fastest step of all says nothing of fp32 state, nor one whose backward pass updates.
    cells = [
        bench_cell(),
        bench_cell(forward_ms=8.0, optimizer_ms=3.0, **half),
        bench_cell(forward_ms=5.0, optimizer_ms=0.1, kernels="fused", optimizer="adamw", update="backward"),
    ]
    for state, optimizer_ms in (("fp32", 5.0), ("bf16", 3.0)):
        time, source = measured_device_time(cells, SIZES["small"], "bf16", state)
        assert time.optimizer_s == pytest.approx(optimizer_ms / 1e3)
        assert ("state in bf16" in source) == (state == "bf16")
    with pytest.raises(UsageError, match=r"state in split has .* --optimizer adamw --state-dtype split --save"):
        measured_device_time(cells, SIZES["small"], "bf16", "split")


def test_each_number_of_ranks_has_its_own_bandwidth():
    cells = [*RATES, collective(10**9, 5e3, 250.0, ranks=4), collective(10**9, 9e5, 1.0, backend="gloo", ranks=8)]
    assert measured_ranks(cells) == {2: 200e9, 4: 250e9}
    assert measured_ranks([bench_cell(), ddp_cell(50.0)]) == {}


def test_computing_and_communication_slow_each_other_down():
    """Kernels ran for 48 ms in place of 40, 8 of them lost in 20 ms beside communication, which took 25 and not 20."""
    timeline = {"compute_ms": 48.0, "communication_ms": 25.0, "overlap_ms": 20.0}
    cell = ddp_cell(55.0, 40.0, 20.0)
    replayed = replace(
        cell, configuration=cell.configuration | {"cuda_graph": "on"}, derived=cell.derived | {"timeline": timeline}
    )
    beside, source = measured_slowdown([*RATES, cell, replayed])
    assert (beside.computing, beside.communication) == pytest.approx((0.6, 0.8))
    assert source == "ddp, 1 steps in CUDA graphs"
    after = replace(replayed, derived={"timeline": timeline | {"overlap_ms": 1.0}})
    launched = replace(cell, derived={"timeline": timeline})
    by_engines = replace(replayed, configuration=replayed.configuration | {"transport": "copy-engines"})
    nothing, source = measured_slowdown([cell, launched, after, by_engines])
    assert (nothing.computing, nothing.communication) == (1, 1)
    assert source.startswith("assumed")


def test_copy_engines_are_named_beside_the_mode():
    workload = ParallelWorkload(TRAINING, "bucketed", 2, bucket_mb="block", transport="copy-engines")
    cell = replace(ddp_cell(45.0), configuration=workload.configuration())
    _, (table,) = compare_with_measured([*RATES, cell, ddp_cell(45.0)], None, None)
    assert [row["strategy"] for row in table.rows] == ["bucketed copy engines", "naive"]


@pytest.mark.parametrize(
    ("step_ms", "communication_ms", "off", "verdict"),
    [
        (42.0, 10.0, 0.0, ""),
        (50.0, 10.0, 0.0, ""),
        (54.0, 10.0, 8.0, ""),
        (75.0, 10.0, 50.0, "launches"),
        (75.0, 30.0, 50.0, "calls"),
        # Data parallel ranks update all that they update without communication.
        (30.0, 10.0, -25.0, "faster than its parts, although as much is computed: noise"),
    ],
)
def test_steps_beside_the_model(step_ms, communication_ms, off, verdict):
    """2 GB of gradients at 200 GB/s take 10 ms on two ranks: 40 ms beside computing, 50 ms after it."""
    (c, w), (table,) = compare_with_measured([*RATES, ddp_cell(step_ms, 40.0, communication_ms)], None, None)
    assert (c, w) == (200e12, 200e9)
    (row,) = table.rows
    assert row["sent_bytes"] == 2e9
    assert (row["communication_ms"], row["overlapped_ms"], row["in_turn_ms"]) == pytest.approx((10, 40, 50))
    assert row["predicted_computing_ms"] == pytest.approx(model_flops(SIZES["small"]) / 2 / 200e12 * 1e3)
    assert row["off_percent"] == pytest.approx(off)
    assert row["verdict"].startswith(verdict)
    assert bool(row["verdict"]) == bool(verdict)


def test_ranks_that_share_the_update_may_be_faster_than_without_communication():
    workload = ParallelWorkload(TRAINING, "optimizer", 2)
    cell = replace(ddp_cell(30.0), command="shard", configuration=workload.configuration())
    _, (table,) = compare_with_measured([*RATES, cell], None, None)
    assert table.rows[0]["verdict"] == "faster than its parts: less is updated than without communication"


def test_given_rates_come_first_and_machines_are_kept_apart(tmp_path):
    assert compare_with_measured([bench_cell()], 1e12, 2e9) == ((1e12, 2e9), [])
    run = {"schema_version": 1, "kind": "run", "time": "", "arguments": [], "environment": {}}
    paths: list[Path] = []
    for number, gpu in enumerate(("NVIDIA H100", "NVIDIA H200")):
        paths.append(tmp_path / f"{number}.jsonl")
        paths[-1].write_text(json.dumps(run | {"run_id": str(number), "machine": {"gpu": gpu}}) + "\n")
    assert read_measured(paths[:1]) == []
    with pytest.raises(UsageError, match="several machines, NVIDIA H100, NVIDIA H200"):
        read_measured(paths)
    # CPUs of two kinds, without a GPU, were taken for one machine. One path may name several files.
    for path, cpu in zip(paths, ("AMD EPYC", "Intel Xeon"), strict=True):
        path.write_text(json.dumps(run | {"run_id": path.name, "machine": {"gpu": None, "cpu": cpu}}) + "\n")
    with pytest.raises(UsageError, match="several machines, AMD EPYC, Intel Xeon"):
        read_measured([Path(",".join(map(str, paths)))])
