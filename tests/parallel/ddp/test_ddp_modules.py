"""Checkpointed, compiled, copied and partly frozen modules train as others do, and save as themselves."""

import ddp_modules_ranks
import pytest
from ddp_modes import EVERY_MODE
from same_tensors import assert_same, dict_of


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_changes_nothing(ranks, use_reentrant):
    expected = ranks(2).run(ddp_modules_ranks.checkpointed, None)[0]["naive"]
    for result in ranks(2).run(ddp_modules_ranks.checkpointed, use_reentrant):
        for mode in EVERY_MODE:
            assert_same(result[mode], expected)


def test_module_used_twice_under_checkpointing(ranks):
    expected = ranks(2).run(ddp_modules_ranks.checkpointed, None, 2)[0]["naive"]
    for mode, averaged in ranks(2).run(ddp_modules_ranks.checkpointed, False, 2)[0].items():
        assert_same(averaged, expected)
        kind, message = ranks(2).run(ddp_modules_ranks.checkpointed, True, 2)[0][mode]
        assert (kind, "use_reentrant=False" in message) == ("UsageError", True)


def test_start_values_are_those_of_the_first_rank(ranks):
    first, second = ranks(2).run(ddp_modules_ranks.start_values)
    assert first == second
    assert first["weight"] == [[1.0, 1.0]] * 3
    assert first["frozen"] == [1] * 4
    assert first["row"] == [[1.0] * 4] * 3
    assert first["column"] == [1.0] * 3
    assert first["passing"] == [1.0] * 2


def test_unfrozen_parameter_is_an_error_until_refresh(ranks):
    for result in ranks(2).run(ddp_modules_ranks.unfreeze):
        for mode in EVERY_MODE:
            before, error, after = result[mode]
            assert_same(before, dict_of(used=3.0, sometimes=None, never=None))
            assert error == ("UsageError", "sometimes was unfrozen after it was wrapped: call refresh() on every rank")
            assert_same(after, dict_of(used=3.0, sometimes=3.0, never=None))


def test_state_dict_has_no_prefix_and_loads_either_way(ranks):
    (result,) = ranks(1).run(ddp_modules_ranks.state_dicts)
    assert result.pop("nested names") == []
    assert result.pop("missing") == "RuntimeError"
    assert all(result.values()), result


def test_deep_copy_and_new_wrapper_average_once(ranks):
    for result in ranks(2).run(ddp_modules_ranks.copies):
        for mode in EVERY_MODE:
            shares_nothing, copied, wrapped_again, hooks, launched = result[mode]
            assert shares_nothing
            assert_same(copied, dict_of(used=3.0, sometimes=3.0))
            assert_same(wrapped_again, dict_of(used=3.0, sometimes=3.0, never=None))
            assert hooks == [1, 1, 1]
            assert launched == ["never", "sometimes", "used"]


@pytest.mark.parametrize("what", ["blocks", "model", pytest.param("around", marks=pytest.mark.nightly)])
def test_compiled_modules_give_the_same_and_blocks_overlap(ranks, what):
    eager = ranks(2).run(ddp_modules_ranks.compiled, None)[0]
    for result in ranks(2).run(ddp_modules_ranks.compiled, what):
        for mode in EVERY_MODE:
            launched, averaged = result[mode]
            assert_same(averaged, eager[mode][1], rtol=1e-6, atol=1e-6)
            if what == "blocks":
                # Three of four blocks, each with weight and bias; the first bucket ends in the third of them.
                assert launched == {"overlap": 6, "bucketed": 1}.get(mode, 0)


def test_module_without_anything_to_train(ranks):
    ranks(2).run(ddp_modules_ranks.nothing_to_train)
