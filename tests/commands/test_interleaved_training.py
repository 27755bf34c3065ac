"""Steps taken in turn, and what each cell is told of them."""

import pytest
import torch

from cs336sys.commands.bench import measure as bench
from cs336sys.commands.bench.measure import measure_interleaved
from cs336sys.settings.sizes import choose_size
from cs336sys.settings.training import Workload
from cs336sys.training.model import ATTENTION_FUNCTIONS, attention_function, use_attention

SIZE = choose_size("tiny", context=16, batch_size=2, vocab_size=50)
TOGETHER = {"interleave": "attention", "interleaved": "reference,sdpa"}


def cell(attention, **settings):
    workload = Workload(SIZE, device="cpu", warmup=2, steps=3, attention=attention, **settings)
    return workload.configuration() | TOGETHER


@pytest.fixture(autouse=True)
def attention_as_it_was():
    yield
    use_attention(Workload(SIZE))


@pytest.fixture
def attended(monkeypatch):
    """The attentions in the order of their calls, once for each layer of each step."""
    calls = []

    def recorded(name):
        function = attention_function(name)

        def attention(**inputs):
            calls.append(name)
            return function(**inputs)

        return attention

    for name in ("reference", "sdpa"):
        monkeypatch.setitem(ATTENTION_FUNCTIONS, name, recorded(name))
    return calls


def test_each_is_warmed_up_alone_and_then_steps_are_taken_in_turn(attended):
    stages = []
    outcomes = [measure_interleaved(cell(name), stages.append) for name in ("reference", "sdpa")]
    steps = attended[:: SIZE.num_layers]
    assert steps == ["reference"] * 2 + ["sdpa"] * 2 + ["reference", "sdpa"] * 3
    assert len(attended) == len(steps) * SIZE.num_layers
    assert stages == [
        "reference: building the model",
        "reference: warm-up 1/2",
        "reference: warm-up 2/2",
        "sdpa, 1 more in memory: building the model",
        "sdpa, 1 more in memory: warm-up 1/2",
        "sdpa, 1 more in memory: warm-up 2/2",
        "step 1/3 of each",
        "step 2/3 of each",
        "step 3/3 of each",
    ]
    for outcome in outcomes:
        assert outcome.status == "ok"
        assert {(len(sample.warmup), len(sample.measured)) for sample in outcome.samples.values()} == {(2, 3)}
        assert outcome.derived["tokens_per_s"] == pytest.approx(2 * 16 / (outcome.samples["step"].mean / 1e3))
    assert outcomes[0].samples["step"].measured != outcomes[1].samples["step"].measured


def test_a_cell_asked_for_again_and_cells_of_others_are_measured(attended):
    measure_interleaved(cell("reference"), print)
    for configuration in (cell("reference"), cell("reference", mode="forward"), cell("sdpa")):
        attended.clear()
        measure_interleaved(configuration, print)
        assert attended
    attended.clear()
    measure_interleaved(cell("reference"), print)
    assert not attended


def test_nothing_is_compiled_while_steps_are_taken_in_turn(monkeypatch):
    graphs, before_turns = [], []

    def record(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def progress(stage):
        if stage.startswith("step 1/"):
            before_turns.append(len(graphs))

    compile_with_inductor = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda code, **settings: compile_with_inductor(code, backend=record, **settings)
    )
    torch.compiler.reset()
    measure_interleaved(cell("sdpa", compile="block"), progress)
    torch.compiler.reset()
    assert [len(graphs)] == before_turns
    assert len(graphs) >= 3, "a block with either attention, and the loss"


def test_memory_of_the_others_is_not_counted(monkeypatch):
    held_gib = iter([1.0, 1.0, 4.0])  # before the first, and when each is built: something is left from cells before
    peaks = iter([6.0, 9.0])
    monkeypatch.setattr(bench, "held_memory_gib", lambda device: next(held_gib))
    monkeypatch.setattr(bench, "peak_memory_gib", lambda device: next(peaks))
    outcomes = [measure_interleaved(cell(name), print) for name in ("reference", "sdpa")]
    assert [outcome.derived["peak_gib"] for outcome in outcomes] == [6.0, 6.0]
