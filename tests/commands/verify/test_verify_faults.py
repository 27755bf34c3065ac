"""Planted faults are found and named, and right wraps raise no alarm; ranks are started once."""

import random
import sys
from collections import Counter
from pathlib import Path

import pytest

from cs336sys.commands.verify import measure
from cs336sys.commands.verify.library import verify
from cs336sys.commands.verify.measure import measure_case
from cs336sys.parallel.ranks import launch
from cs336sys.parity.collectives import CollectiveWatcher
from cs336sys.settings.sizes import choose_size
from cs336sys.settings.training import UserCode, Workload
from cs336sys.settings.verification import CASES, SEQUENCES, SMALL, WRAPS, VerifiedWorkload
from cs336sys.training.user_models import innermost_line

sys.path.insert(0, str(__file__).rpartition("/")[0])
import audit_faults
import faults
import real_bugs

pytestmark = pytest.mark.usefixtures("one_thread_a_rank", "time_limit")


@pytest.fixture(scope="module", autouse=True)
def kept_ranks(one_thread_a_rank):
    yield
    launch.end_kept()


def outcome_of(wrap, case, *, world_size=2, mesh="data", seed=0, model=None, loss=None, batch=None, **settings):
    size = choose_size("tiny", batch_size=SEQUENCES * world_size, **SMALL)
    training = Workload(size, device="cpu", seed=seed, user=UserCode(model=model, loss=loss, batch=batch))
    workload = VerifiedWorkload(training, wrap, world_size, case, mesh, **settings)
    return measure_case(workload.configuration(), lambda stage: None)


def outcomes_of(fault):
    settings = {"model": fault.model, "world_size": fault.world_size, "mesh": fault.mesh, "timeout_s": 10.0}
    return {case: outcome_of(fault.wrap, case, **settings) for case in ("step", *fault.cases)}


def nightly_unless(is_quick, *values, id):
    return pytest.param(*values, id=id, marks=() if is_quick else pytest.mark.nightly)


@pytest.mark.parametrize(
    "fault",
    [
        *(pytest.param(fault, id=fault.name) for fault in faults.FAULTS if fault.is_quick),
        # Of public projects.
        *(nightly_unless(bug.is_quick, bug, id=bug.name) for bug in real_bugs.BUGS),
    ],
)
def test_fault_is_found_and_its_cause_is_named(fault):
    outcomes = outcomes_of(fault)
    wrong = [outcome for outcome in outcomes.values() if outcome.status == "wrong"]
    assert wrong
    assert set(fault.causes) & {outcome.derived["cause"] for outcome in wrong}
    if fault.cases:
        assert outcomes["step"].status == "ok", "the case alone shows it"


def test_method_that_a_ready_wrap_lacks_is_refused():
    outcome = outcome_of("bucketed", "step", finish="finish_gradients")
    assert outcome.derived["cause"] == "raises"
    assert "did you mean finish_gradient_synchronization?" in outcome.reason


AUDIT = audit_faults.__file__
MODELS = Path(__file__).parents[2] / "user_models.py"


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("right_muon", "step"),
        ("right_muon_and_adamw", "step"),
        ("right_muon", "groups"),
        ("right_course_zero", "step"),
        ("right_sharded_sgd", "step"),
        ("right_hooks_and_sharded_sgd", "accumulation"),
        ("right_schedule", "step"),
        ("right_flat_groups", "groups"),
        ("half_parameters", "step"),
        pytest.param("ring", "order", marks=pytest.mark.nightly),
        pytest.param("right_muon", "run", marks=pytest.mark.nightly),
    ],
)
def test_right_wrap_of_an_unusual_kind_raises_no_alarm(name, case):
    outcome = outcome_of(f"{AUDIT}:{name}", case)
    assert outcome.status == "ok", outcome.reason


@pytest.mark.parametrize(
    ("name", "case", "cause", "sentence"),
    [
        ("muon_without_average", "step", "not waited for", "each rank keeps its own gradient"),
        ("schedule_of_all_ranks", "step", "schedule", "after step 1 the learning rate is 0.125 on rank 0, and 0.25"),
        ("infinities_zeroed", "scaling", "scaling", "no rank skips the step in which the gradients of one were inf"),
        ("clips_its_own", "step", "scaled", "times what they should, as where each clips its own before they are aver"),
        ("rates_of_ranks", "step", "schedule", "is 0.2 on rank 1, and 0.1 in one process: ranks have different ones"),
        ("own_steps", "step", "optimizer", "compared with those of AdamW (lr 1, eps 1, weight_decay 0.01)"),
        ("half_parameters_summed", "step", "not averaged", "2 times too large, the number of ranks"),
        ("matrices_in_no_group", "groups", "groups", "group of weight_decay 0.5 is empty, and all 16 matrices"),
        ("other_flags_of_overflow", "order", "order", "with an overflow on one rank, the ranks' collectives differ"),
        (f"{faults.DATA}:InputsReversed", "step", "wrong inputs", "rank 1 computes on other inputs than its"),
        (f"{faults.DATA}:UnusedNotSent", "unused", "died", "differ: rank 0 launches allreduce of 2,048 float64 at"),
        (f"{faults.DATA}:UnusedNotSent", "order", "order", "with a parameter that one rank does not use, the ranks'"),
        pytest.param("ring_of_nothing", "step", "hang", "which none sends", marks=pytest.mark.nightly),
    ],
)
def test_fault_of_an_unusual_kind_is_named_in_a_sentence(name, case, cause, sentence):
    outcome = outcome_of(name if ":" in name else f"{AUDIT}:{name}", case, timeout_s=10.0)
    assert outcome.status == "wrong"
    assert outcome.derived["cause"] == cause, outcome.reason
    assert sentence in outcome.reason


def test_case_alone_says_nothing_of_a_plain_step_that_was_not_run(monkeypatch):
    """It said "it is right with one micro-batch a step" where it was wrong there, too."""
    monkeypatch.setattr(measure, "_plain_step_diagnoses", {})
    (wrap,) = [fault.wrap for fault in faults.FAULTS if fault.wrap.endswith(":Summed")]
    outcome = outcome_of(wrap, "accumulation")
    assert (outcome.status, outcome.derived["cause"]) == ("wrong", "not averaged")
    assert "as in the plain step: gradients are 2 times too large" in outcome.reason


@pytest.mark.parametrize("case", ["accumulation", "late"])
def test_wrap_that_computes_in_no_float64_is_compared_in_float32_where_the_step_was_not_run(monkeypatch, case):
    """Only the plain step was run again in float32: a case alone, or after ``--resume``, was refused."""
    monkeypatch.setattr(measure, "_plain_step_diagnoses", {})
    monkeypatch.setattr(measure, "_float32_only", set())
    outcome = outcome_of(f"{AUDIT}:right_without_float64", case)
    assert outcome.status == "ok", outcome.reason
    assert outcome.derived["reference_dtype"] == "float32"


def test_line_of_a_collective_is_the_users_where_packages_lie_below_their_file():
    """Of a wrap whose folder holds its environment, a line of ours was named."""
    watcher = CollectiveWatcher([Path(__file__).parents[3] / "mine.py"], is_late=False)
    assert watcher._line().startswith("test_verify_faults.py, line ")
    inner = Path("/p/.venv/lib/python3.11/site-packages/torch/distributed/c10d_logger.py")
    assert innermost_line([(Path("/p/mine.py"), 5), (inner, 83)], [Path("/p/mine.py")]) == "mine.py, line 5"
    # The user's folder may have the name of ours, also where another file of theirs lies elsewhere.
    theirs, other = Path("/home/cs336sys/mine.py"), Path("/data/batches.py")
    assert innermost_line([(theirs, 7), (inner, 83)], [theirs, other]) == "mine.py, line 7"


def test_layer_and_parameter_of_a_users_model_are_named():
    user = {"model": f"{MODELS}:Classifier", "batch": f"{MODELS}:images", "loss": f"{MODELS}:classes"}
    outcome = outcome_of(f"{AUDIT}:louder_head", "step", **user)
    assert "the output of head is 1.5 times what it should be" in outcome.reason, "a model with batch norm"
    outcome = outcome_of(f"{faults.DATA}:unfreezes", "step", model=f"{faults.DATA}:partly_frozen")
    assert outcome.derived["cause"] == "frozen"
    assert "0.weight is frozen in the model, and the wrap trains it" in outcome.reason


def test_what_a_case_could_not_look_at_stands_in_its_row():
    flat = outcome_of(f"{AUDIT}:right_flat_groups", "step")
    assert flat.derived["not_compared"] == "gradients, optimizer state"
    assert outcome_of(f"{AUDIT}:ring", "step").derived["not_compared"] is None
    result = verify(f"{AUDIT}:right_flat_groups", cases=["step"], device="cpu")
    assert result.report == "step: ok (not compared: gradients, optimizer state)"


def one_of_each(wraps):
    """By default those of whose kind there is no other."""
    for wrap, *rest in wraps:
        name = wrap.rpartition(":")[2]
        yield nightly_unless(name in faults.REPRESENTATIVE, wrap, *rest, id=name)


@pytest.mark.parametrize(("wrap", "mesh", "cases"), one_of_each(faults.RIGHT))
def test_right_wrap_raises_no_alarm(wrap, mesh, cases):
    outcomes = {case: outcome_of(wrap, case, mesh=mesh) for case in cases}
    assert [f"{case}: {outcome.reason}" for case, outcome in outcomes.items() if outcome.status == "wrong"] == []
    assert outcomes["step"].status == "ok"
    assert outcomes["step"].derived["relative_difference"] < 1e-12


@pytest.mark.parametrize(("wrap", "dtype", "cases"), one_of_each(faults.LESS_PRECISE))
def test_lower_precision_is_no_alarm(wrap, dtype, cases):
    for case in cases:
        outcome = outcome_of(wrap, case)
        assert outcome.status == "ok", f"{case}: {outcome.reason}"
        assert f" in {dtype}, so they may be as far off as one process in it" in outcome.derived["notes"][0]


@pytest.mark.nightly
def test_nearly_every_fault_of_the_catalogue_is_found():
    missed, unnamed = [], []
    for fault in faults.FAULTS:
        wrong = [outcome for outcome in outcomes_of(fault).values() if outcome.status == "wrong"]
        if not wrong:
            missed.append(fault.name)
        if not set(fault.causes) & {outcome.derived["cause"] for outcome in wrong}:
            unnamed.append(fault.name)
    print(f"missed: {missed}; not named: {unnamed}")
    assert len(missed) <= 3
    assert len(unnamed) <= len(faults.FAULTS) // 4


AUDITED = ("right_muon", "right_muon_and_adamw", "right_course_zero", "right_schedule")
# Wraps that are right, each with what its ranks share and its cases.
RIGHT_PROGRAMS = (
    *((wrap, dimension, tuple(CASES)) for wrap, dimension in WRAPS.items() if wrap not in ("accelerate", "deepspeed")),
    *faults.RIGHT,
    *((f"{AUDIT}:{name}", "data", ("step", "accumulation", "uneven", "groups", "run")) for name in AUDITED),
    (f"{AUDIT}:half_parameters", "data", ("step",)),
)
# A parameter that one rank does not use aborts ranks of torch's fully_shard (torch 2.13).
ABORTING = {("fsdp2", "unused")}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("wrap", "mesh", "case"),
    [
        pytest.param(wrap, mesh, case, id=f"{wrap.rpartition(':')[2]}-{case}")
        for wrap, mesh, cases in RIGHT_PROGRAMS
        for case in cases
        if (wrap, case) not in ABORTING
    ],
)
def test_right_program_raises_no_alarm_for_any_seed(pytestconfig, wrap, mesh, case):
    seeds = range(max(1, round(20 * pytestconfig.option.nightly_share)))
    outcomes = {seed: outcome_of(wrap, case, mesh=mesh, seed=seed) for seed in seeds}
    if all(outcome.status == "unsupported" for outcome in outcomes.values()):
        pytest.skip(f"does not apply: {outcomes[0].reason}")
    assert {seed: outcome.reason for seed, outcome in outcomes.items() if outcome.status != "ok"} == {}


def test_right_programs_raise_no_alarm(tier):
    """A wrap, a case, a number of ranks and a seed drawn so often; prints how many end in which verdict."""
    draw = random.Random(tier.seed)
    verdicts, alarms = Counter(), []
    while verdicts.total() < tier.choose(2, 5000):
        wrap, dimension, cases = draw.choice(RIGHT_PROGRAMS)
        case, world_size, seed = draw.choice(cases), draw.choice((2, 2, 2, 3, 4)), draw.randrange(1000)
        if (wrap, case) in ABORTING:
            continue
        outcome = outcome_of(wrap, case, mesh=dimension, world_size=world_size if dimension == "data" else 2, seed=seed)
        verdicts[outcome.status] += 1
        if outcome.status not in ("ok", "unsupported"):
            alarms.append(f"{wrap}, {case}, {world_size} ranks, seed {seed}: {outcome.reason}")
    print(dict(verdicts))
    assert alarms == []
