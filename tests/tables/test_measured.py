"""Rates of a machine and its steps beside the model, from saved results, as ``measured.txt`` has them.

Expressions and what they give (tests/written_figures.py).
"""

# Further names are used in measured.txt.
# ruff: noqa: F401

import json
from dataclasses import replace
from pathlib import Path

import pytest
from written_figures import outcome, read_figures, rows_of, write_figures

from cs336sys.accounting.communication import measured_slowdown
from cs336sys.accounting.flops import count_parameters, model_flops
from cs336sys.commands.account.rates import (
    compare_with_measured,
    measured_bandwidth,
    measured_call,
    measured_device_time,
    measured_flops,
    measured_ranks,
    read_measured,
)
from cs336sys.errors import UsageError
from cs336sys.results.model import Cell, Samples
from cs336sys.settings.parallel import ParallelWorkload
from cs336sys.settings.sizes import SIZES
from cs336sys.settings.training import Workload

PATH = Path(__file__).with_name("measured.txt")
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


def rank_cell(step_ms, communication_ms=10.0, strategy="naive", command="ddp", timeline=None, **settings):
    """Return a step that takes 40 ms without communication; with a timeline, one in a CUDA graph."""
    training = TRAINING if timeline is None else replace(TRAINING, cuda_graph="on")
    workload = ParallelWorkload(training, strategy, 2, **settings)
    samples = {"step": ms(step_ms), "unsynchronized": ms(40.0), "communication": ms(communication_ms)}
    # Those sent are of shard alone.
    derived = {"communicated_bytes": 2_000_000_000, "sent_bytes": 771_752_448, "timeline": timeline}
    return Cell(command, workload.configuration(), "ok", samples, derived)


RATES = (bench_cell(), collective(1000, 50.0, 0.1), collective(10**9, 5000.0, 200.0))
HALF = {"kernels": "fused", "optimizer": "adamw", "state_dtype": "bf16"}


def beside_model(*cells):
    """Return the rates, and how each step compares with the model."""
    rates, (table,) = compare_with_measured([*RATES, *cells], None, None)
    names = ("strategy", "sent_bytes", "communication_ms", "overlapped_ms", "in_turn_ms", "predicted_computing_ms")
    return [rates, *(tuple(row[name] for name in (*names, "off_percent", "verdict")) for row in table.rows)]


@pytest.mark.parametrize(("expression", "rows"), list(read_figures(PATH)), ids=lambda value: str(value)[:60])
def test_rates_and_steps_are_those_written_down(expression, rows):
    assert rows_of(expression, globals()) == rows


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


if __name__ == "__main__":
    write_figures(PATH, globals())
