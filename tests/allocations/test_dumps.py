"""Snapshots of any torch read, their memory told apart, and planted mistakes named."""

import copy
import random

import pytest
import torch
from cuda_snapshots import MIB, VERSIONS, fake_cuda, write
from memory_causes import CAUSES, diagnoses, run
from snapshot_programs import KINDS, Program, program

from cs336sys.allocations.diagnosis import diagnose_memory
from cs336sys.allocations.dump import parse_dump, read_dump
from cs336sys.allocations.inference import FOREIGN_CATEGORIES
from cs336sys.commands.memprof.snapshots import verdicts


@pytest.fixture(scope="module")
def plain():
    """The allocator of a healthy run with a seed that needs no half precision."""
    return run("none", 1)


def named(found):
    return [finding.cause for verdict in verdicts(found) for finding in verdict.causes]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 10))])
@pytest.mark.parametrize("cause", [*CAUSES, "none", "too large"])
def test_planted_mistake_is_the_only_cause_named(cause, seed):
    assert named(diagnoses(cause, seed)) == ([CAUSES[cause]] if cause in CAUSES else [])


def causes_of_program(name, seed, last=None):
    return diagnose_memory("s", *parse_dump(program(name, seed).snapshot(last))).causes


@pytest.mark.parametrize("name", KINDS)
def test_program_on_paper_has_its_cause_and_no_false_proof(name):
    cause, _ = KINDS[name]
    assert [finding.cause for finding in causes_of_program(name, 0)] == ([cause] if cause else [])


def test_healthy_programs_on_paper_have_no_cause(tier):
    """Prints how many were drawn, and for how many a cause was named."""
    healthy = [name for name, (cause, _) in KINDS.items() if cause is None]
    draw = random.Random(tier.seed)
    programs = [(draw.choice(healthy), draw.randrange(10**9)) for _ in range(tier.choose(3, 1000))]
    named_causes = [
        (*program_seed, causes) for program_seed in programs if (causes := causes_of_program(*program_seed))
    ]
    print(f"{len(programs)} healthy programs, {len(named_causes)} with a cause")
    assert named_causes == []


@pytest.mark.nightly
def test_programs_on_paper_are_named_right_in_95_of_100():
    """And no cause is proved that is none."""
    right = 0
    for name, (cause, _) in KINDS.items():
        for seed in range(13):
            found = causes_of_program(name, seed)
            assert {finding.cause for finding in found if finding.certainty == "measured"} <= {cause}, (name, seed)
            right += [finding.cause for finding in found] == ([cause] if cause else [])
    assert right >= 0.95 * 13 * len(KINDS)


def test_growth_over_a_loop_without_steps_is_not_proved():
    """Whether the same lines run once a layer or once an iteration, only steps prove."""
    for name in ("evaluation_keeps_graphs", "generation", "leak_without_stacks"):
        assert [finding.certainty for finding in causes_of_program(name, 0)] == ["looks like"], name
    (verdict,) = verdicts([diagnose_memory("s", *parse_dump(program("generation", 0).snapshot()))])
    assert "This looks like growing cache, which the snapshot does not prove" in verdict.sentence
    assert "To decide: whether that line is called once an iteration" in verdict.sentence


@pytest.mark.parametrize(
    ("has_stacks", "layers", "steps", "last"),
    [(True, 4, 6, None), (False, 4, 6, None), (True, 8, 20, 4000), (True, 8, 20, 1500)],
)
def test_rate_of_a_leak_needs_neither_stacks_nor_a_whole_history(has_stacks, layers, steps, last):
    p = Program(0, has_stacks=has_stacks)
    p.layers = layers
    p.build()
    p.train(steps, each=lambda step: p.allocate(24 * MIB, [{"filename": "/u/a.py", "line": 1, "name": "keep"}]))
    (cause,) = diagnose_memory("s", *parse_dump(p.snapshot(last))).causes
    assert (cause.cause, cause.facts["step_bytes"]) == ("leak", 24 * MIB)


def test_metadata_that_is_no_text_names_no_step():
    p = Program(0)
    p.free(p.allocate(MIB))
    nested = []
    for _ in range(100_000):
        nested = [nested]
    p.trace[1]["user_metadata"] = nested
    (record,) = parse_dump(p.snapshot())
    assert record.step_marks == []
    while nested:
        nested = nested.pop()


def test_user_metadata_names_steps():
    p = Program(0)
    p.build()
    for step in range(5):
        start = len(p.trace)
        p.allocate(24 * MIB, [{"filename": "/u/a.py", "line": 1, "name": "keep"}])
        p.free(p.allocate(MIB))
        for entry in p.trace[start:]:
            entry["user_metadata"] = f"step {step}"
    (record,) = parse_dump(p.snapshot())
    assert len(record.step_marks) == 4
    (cause,) = diagnose_memory("s", record).causes
    assert (cause.cause, cause.certainty, cause.facts["step_bytes"]) == ("leak", "measured", 24 * MIB)


@pytest.mark.parametrize("layers", [4, 48])
def test_first_step_that_does_not_fit_says_so(layers):
    p = Program(0)
    p.layers = layers
    p.build()
    p.fail(0.6 * layers * p.activation * 7, lambda: p.forward([{"filename": "/u/t.py", "line": 9, "name": "step"}]))
    (verdict,) = verdicts([diagnose_memory("s", *parse_dump(p.snapshot()))])
    assert verdict.causes == []
    assert "It failed before the end of the first step" in verdict.sentence


def test_first_update_that_does_not_fit_says_so():
    """Its state does not become smaller with the batch."""
    p = Program(0)
    p.build()
    stack = [{"filename": "/v/site-packages/torch/optim/adamw.py", "line": 410, "name": "_init_group"}]
    p.backward(p.forward([{"filename": "/u/t.py", "line": 9, "name": "step"}]), [])
    p.fail(1.5 * p.width, lambda: [p.allocate(p.width, stack) for _ in range(2)])
    (verdict,) = verdicts([diagnose_memory("s", *parse_dump(p.snapshot()))])
    assert "It failed in the optimizer's first update" in verdict.sentence
    assert "a smaller batch does not make them smaller" in verdict.sentence


def test_a_model_that_does_not_fit_consists_of_parameters():
    p = Program(0)
    p.fail(2.5 * p.width, p.build)
    (verdict,) = verdicts([diagnose_memory("s", *parse_dump(p.snapshot()))])
    assert verdict.diagnosis.by_category["parameters"] == 2 * p.width
    assert "It failed while a model was built" in verdict.sentence


def test_entries_that_are_repeated_count_once():
    snapshot = program("list_of_outputs", 0).snapshot()
    before = diagnose_memory("s", *parse_dump(snapshot))
    (trace,) = snapshot["device_traces"]
    snapshot["device_traces"] = [[entry for entry in trace for _ in range(2)]]
    twice = diagnose_memory("s", *parse_dump(snapshot))
    assert (twice.peak, twice.causes[0].where) == (before.peak, before.causes[0].where)


@pytest.mark.parametrize(
    ("of_copy", "certainty"),
    [("/u/t.py", "looks like"), ("/site-packages/pml/loss.py", "looks like"), ("/v/torch/nn/loss.py", "measured")],
)
def test_a_loss_may_join_two_products(of_copy, certainty):
    p = Program(0)
    p.build()
    p.train(1)
    p.logits = p.layers * p.activation
    p.forward([{"filename": "/u/t.py", "line": 9, "name": "step"}], loss=False)
    p.allocate(2 * p.logits, [{"filename": of_copy, "line": 12, "name": "contrastive_loss"}])
    (cause,) = diagnose_memory("s", *parse_dump(p.snapshot())).causes
    assert (cause.cause, cause.certainty) == ("fp32 logits", certainty)


def test_paths_of_windows_name_the_same_lines():
    snapshot = program("list_of_outputs", 0).snapshot()
    (before,) = diagnose_memory("s", *parse_dump(snapshot)).causes
    for entry in snapshot["device_traces"][0]:
        entry["frames"] = [frame | {"filename": frame["filename"].replace("/", "\\")} for frame in entry["frames"]]
    (cause,) = diagnose_memory("s", *parse_dump(snapshot)).causes
    assert cause.where == before.where


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_s_form_reads_alike(plain, version, tmp_path):
    snapshot = plain.snapshot(version)
    written = diagnose_memory("s", *read_dump(write(tmp_path / "s.pickle", snapshot)))
    newest = diagnose_memory("s", *parse_dump(plain.snapshot()))
    assert (written.size, written.by_category, written.kinds) == (newest.size, newest.by_category, newest.kinds)
    fields = {key for entry in snapshot["device_traces"][0] for key in entry}
    assert ("time_us" in fields, "pool_id" in fields) == (version != "2.1", version == "2.13")


def mosaic_peak(snapshot):
    """The peak by the rules of facebookresearch/mosaic: blocks of no event, and the most that allocations hold."""
    (trace,) = snapshot["device_traces"]
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    touched = {entry["addr"] for entry in trace if entry["action"] in ("alloc", "free_requested", "free_completed")}
    older = (block for block in blocks if block["state"] == "active_allocated" and block["address"] not in touched)
    live, held, peak = set(), 0, 0
    for entry in trace:
        if entry["action"] == "alloc":
            live.add(entry["addr"])
            held += entry["size"]
        elif entry["action"] == "free_completed" and entry["addr"] in live:
            live.remove(entry["addr"])
            held -= entry["size"]
        peak = max(peak, held)
    return peak + sum(block["size"] for block in older)


@pytest.mark.parametrize(("name", "last"), [*((name, None) for name in KINDS), ("list_of_outputs", 400)])
def test_peak_is_that_of_mosaic(name, last):
    snapshot = program(name, 3).snapshot(last)
    assert diagnose_memory("s", *parse_dump(snapshot)).peak == mosaic_peak(snapshot)


def test_failure_right_after_a_free_counts_what_is_left():
    with fake_cuda(capacity=64 * MIB) as allocator:
        kept = torch.empty(20 * MIB, dtype=torch.uint8)
        torch.empty(10 * MIB, dtype=torch.uint8)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(100 * MIB, dtype=torch.uint8)
    found = diagnose_memory("s", *parse_dump(allocator.snapshot()))
    assert found.moment.failure is not None
    assert sum(found.by_category.values()) == sum(kind.total for kind in found.kinds) == found.size == 20 * MIB
    del kept


def test_record_that_begins_late_counts_what_was_there(plain):
    """A full ring buffer, or a history that was switched on in mid-training: older memory counts as handed out."""
    whole = diagnose_memory("s", *parse_dump(plain.snapshot()))
    assert set(whole.by_category) == set(FOREIGN_CATEGORIES)
    snapshot = plain.snapshot(entries=len(plain.trace) // 2)
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    rounding = sum(block["size"] - block["requested_size"] for block in blocks if block["state"] == "active_allocated")
    late = diagnose_memory("s", *parse_dump(snapshot))
    assert whole.peak <= late.peak <= whole.peak + rounding
    for category in ("parameters", "optimizer state", "gradients", "activations"):
        assert 0 <= late.by_category[category] - whole.by_category[category] <= rounding
    for block in blocks:
        block["frames"] = []
    by_sizes = diagnose_memory("s", *parse_dump(snapshot)).by_category
    for category in ("parameters", "optimizer state"):
        assert by_sizes[category] == pytest.approx(late.by_category[category], rel=0.05), "found by sizes alone"


def test_snapshot_without_stacks_or_history(plain):
    bare = diagnose_memory("s", *parse_dump(run("none", 1, stacks="none").snapshot()))
    assert not bare.moment.record.has_stacks
    assert bare.by_category["unknown"] == bare.size
    snapshot = plain.snapshot()
    state = diagnose_memory("s", *parse_dump({"segments": snapshot["segments"]}))
    held = sum(segment["allocated_size"] for segment in snapshot["segments"])
    assert (state.size, state.moment.position) == (held, 0)


def test_stacks_of_cpp_give_the_same_categories(plain):
    found = diagnose_memory("s", *parse_dump(run("none", 1, stacks="all").snapshot()))
    assert found.by_category == diagnose_memory("s", *parse_dump(plain.snapshot())).by_category


def test_several_devices_and_graph_pools():
    with fake_cuda(device=2) as allocator:
        allocator.pool = (0, 7)
        kept = torch.empty(30 * MIB, dtype=torch.uint8)
        allocator.pool = (0, 0)
        other = torch.empty(2 * MIB, dtype=torch.uint8)
    for version in ("2.1", "2.13"):
        (record,) = parse_dump(allocator.snapshot(version))
        found = diagnose_memory("s", record)
        assert (found.name, found.by_category["graph pools"]) == ("s, device 2", 30 * MIB)
    first = allocator.snapshot()
    second = copy.deepcopy(first)
    second["segments"][0]["device"] = 0
    assert [record.device for record in parse_dump(second)] == [0, 2]
    del kept, other


def test_segments_of_the_past_are_rebuilt():
    """What was mapped or given back after the moment is undone."""
    for expandable in (False, True):
        with fake_cuda(expandable=expandable) as allocator:
            first = torch.empty(30 * MIB, dtype=torch.uint8)
            (before,) = parse_dump(allocator.snapshot())
            reserved = allocator.reserved
            second = torch.empty(50 * MIB, dtype=torch.uint8)
            del first, second
            allocator._release([])
        (record,) = parse_dump(allocator.snapshot())
        assert sum(segment.size for segment in record.segments) == 0
        assert sum(segment.size for segment in record.segments_at(before.entry_of_position[-1])) == reserved
