import pytest

from cs336sys.commands.options import at_least, between, one_of, split_list
from cs336sys.errors import UsageError


def test_lists_take_commas_and_repetition_and_drop_repeated_values():
    assert split_list(["a,b", "c", "a"], "--x", str) == ["a", "b", "c"]
    assert split_list(["128, 256"], "--x", at_least(1)) == [128, 256]


@pytest.mark.parametrize(
    ("values", "convert", "sentence"),
    [
        (["a,z"], one_of(("a", "b")), "--x 'z': choose from a, b"),
        (["128,"], at_least(1), "--x '': not a number"),
        (["12k"], at_least(1), "--x '12k': not a number"),
        (["0"], at_least(1), "--x '0': must be at least 1"),
        (["101"], between(0, 100), "--x '101': must be between 0 and 100"),
        ([], str, "--x needs at least one value"),
    ],
)
def test_a_value_that_cannot_be_is_named_with_its_rule(values, convert, sentence):
    with pytest.raises(UsageError) as refused:
        split_list(values, "--x", convert)
    assert str(refused.value) == sentence
