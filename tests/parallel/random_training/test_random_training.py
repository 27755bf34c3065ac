"""Random programs under every wrapper and optimizer equal one process on the whole batch, action by action."""

import functools
import itertools
import time
from collections import Counter

import planted_faults
import pytest
from random_programs import Program, random_program
from running_programs import failures, report


def _step(seed):
    return ("forward", seed), ("backward", "all", True), ("step",)


# Programs that failed once, as they were printed.
REGRESSIONS: tuple[Program, ...] = (
    # The norm lacked a parameter that was unfrozen, without refresh().
    Program(
        wrapper="optimizer-flat",
        actions=(("unfreeze", 2), ("forward", 4, "inner"), ("backward", "all", True), ("clip", 100.0)),
        world_size=3,
        seed=20224,
        kinds=("Dense", "Dense"),
        frozen=0,
    ),
    # A unit returns its input, or a view of a frozen weight, on one rank.
    Program(
        wrapper="fsdp",
        actions=_step(80),
        seed=5002,
        kinds=("SumOfViews", "Dense", "Skipped"),
        side_by_side=(True, True, False),
    ),
    Program(
        wrapper="fsdp",
        actions=(*_step(35), ("zero_grad", "wrapper", True), *_step(36)),
        kinds=("Skipped", "View", "Dense", "Skipped"),
        frozen=1,
        inputs_need_gradients=False,
    ),
    # Slices that are moved between the forward and the backward pass.
    Program(
        wrapper="fsdp",
        actions=(("forward", 35), ("scale_weights", "data", 0), ("backward", "all", True), ("step",)),
        world_size=3,
        kinds=("Twice",),
    ),
    # Only some ranks have a gradient after those of a step were completed.
    Program(
        wrapper="optimizer-flat",
        actions=(
            ("forward", 48),
            ("backward", "all", False),
            ("forward", 25),
            ("backward", "all", True),
            ("forward", 89),
            ("finish",),
            ("backward", "all", True),
            ("clip", 0.1),
        ),
        seed=2097,
        kinds=("Skipped",),
    ),
    # The norm is in the parameters' dtype on ranks without a slice, too.
    Program(
        wrapper="optimizer-flat", actions=(("forward", 1), ("backward", "all", True), ("clip", 0.05)), world_size=3
    ),
    # The largest gradient, where a rank has no rows.
    Program(
        wrapper="fsdp",
        actions=(("forward", 1), ("backward", "all", True), ("clip", 0.05, "inf"), ("step",)),
        world_size=3,
    ),
    # Clipping of nothing.
    Program(wrapper="optimizer-flat", actions=(("clip", 0.1), *_step(52))),
    # A new layer that nobody has told the wrapper of.
    Program(wrapper="overlap", actions=(("add", "Dense", 30), ("evaluate", 43, "no_grad"))),
    # What a user has made of the state is in the state dict.
    Program(wrapper="bucketed+optimizer", actions=(*_step(16), ("edit_state", "reassign")), seed=5010),
    # A refresh() between two passes of a step, which is refused while gradients wait, changes nothing.
    Program(
        wrapper="fsdp",
        actions=(
            ("forward", 64),
            ("backward", "all", False),
            ("forward", 66),
            ("forward", 87, "raises in backward", 0),
            ("backward", "last", True),
            ("refresh",),
            *_step(19),
        ),
        world_size=3,
        seed=30293,
    ),
    # What a user has removed from the state came back by refresh(), and by add_param_group().
    Program(
        wrapper="optimizer-flat",
        actions=(*_step(58), ("edit_state", "clear"), ("refresh",)),
        seed=80274,
        kinds=("Positions", "Dense"),
    ),
    Program(
        wrapper="naive+optimizer",
        actions=(*_step(1), ("add", "Dense", 3), ("refresh",), ("edit_state", "clear"), ("optimize_new",), *_step(2)),
    ),
    # A weight that was frozen by an adapter, after a backward pass of which nothing averaged its gradient.
    Program(
        wrapper="optimizer-flat",
        actions=(
            ("keep_weights",),
            ("restore_weights", True, "module"),
            ("forward", 90, "penalty", 2),
            ("backward", "all", True),
            ("adapt", 1, 59),
            ("step",),
        ),
        seed=100051,
    ),
    # Gradients that the user keeps are in the buffer of those that are zeroed.
    Program(
        wrapper="flat",
        actions=(*_step(1), ("keep_gradients", 0), ("forward", 2), ("backward", "all", True)),
        kinds=("Dense", "Dense"),
    ),
    # Adagrad makes the state of its parameters when it is built, of frozen ones, too.
    Program(
        wrapper="optimizer-flat", actions=(("unfreeze", 0), ("refresh",), *_step(1)), frozen=0, optimizer="adagrad"
    ),
    # The state of a frozen parameter was lost where a checkpoint was loaded.
    *(
        Program(
            wrapper=wrapper,
            actions=(
                *_step(1),
                ("zero_grad", "optimizer", True),
                ("freeze", 1),
                ("refresh",),
                ("restart", 3),
                ("restart", 2),
                ("keep_optimizer",),
                ("restore_optimizer",),
                ("unfreeze", 1),
                ("refresh",),
                *_step(3),
            ),
            kinds=("Dense", "Dense"),
            optimizer="amsgrad",
        )
        for wrapper in ("optimizer-flat", "naive+optimizer")
    ),
    # A hook that is registered between the forward and the backward pass was ignored in silence.
    Program(wrapper="fsdp", actions=(("forward", 28), ("hook", 1), ("backward", "all", True), ("step",))),
    # Wrappers refuse to complete gradients of a changed module, also where none wait.
    Program(wrapper="naive", actions=(("add", "SumOfViews", 73), ("finish",))),
    # A sharded optimizer moves a parameter that is put into a group, which autograd refuses where a pass has used it.
    Program(
        wrapper="optimizer-flat",
        actions=(
            ("keep_weights",),
            ("restore_weights", True, "module"),
            ("forward", 96),
            ("add", "Vectors", 50),
            ("backward", "all", True),
        ),
    ),
    # A module does not drop the gradients of parameters that have left it.
    Program(
        wrapper="optimizer-flat",
        actions=(
            *_step(7),
            ("zero_grad", "module", False),
            ("replace", 3, "Dense", 21),
            ("step",),
            ("zero_grad", "module", True),
            ("step",),
        ),
    ),
)


# Tests that share the drawn programs: each has a limit of time.
PARTS = 8


def test_programs_that_failed_once_equal_one_process(ranks):
    assert_equal_to_one_process(ranks, REGRESSIONS)


@pytest.mark.parametrize("part", range(PARTS))
def test_random_programs_equal_one_process(ranks, tier, part):
    """Add what fails, as it is printed, to ``REGRESSIONS``."""
    first = 10_000 * tier.seed
    count = tier.choose(120, 3000)
    assert_equal_to_one_process(ranks, [random_program(seed) for seed in range(first + part, first + count, PARTS)])


@pytest.mark.parametrize("fault_name", planted_faults.FAULTS)
def test_planted_fault_is_found(ranks, fault_name):
    """By one of the first ten drawn programs that use the class."""
    run_programs = functools.partial(planted_faults.run_faulty_programs, fault_name)
    drawn = map(random_program, range(100_000))
    fitting = (
        program for program in drawn if program.world_size == 2 and planted_faults.FAULTS[fault_name].fits(program)
    )
    for number, program in enumerate(itertools.islice(fitting, 10)):
        if wrong := failures(ranks, [program], run_programs=run_programs):
            print(f"program {number} with seed {program.seed}: {wrong[program]}")
            return
    pytest.fail("nobody has found it")


def assert_equal_to_one_process(ranks, programs):
    counts = Counter()
    failed = failures(ranks, programs, counts)
    for what, count in sorted(counts.items()):
        print(f"{count:7} {what}")
    deadline = time.monotonic() + 30
    shown = [report(ranks, program, text, deadline) for program, text in list(failed.items())[:5]]
    assert not failed, f"{len(failed)} of {len(programs)} programs fail, such as:\n" + "\n".join(shown)
