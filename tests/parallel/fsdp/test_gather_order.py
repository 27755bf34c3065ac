"""Learning the order of units: what is predicted is what the last step did next."""

from cs336sys.parallel.fsdp.gather_order import GatherOrder


def step(order, uses, count=1):
    """What is predicted after each use."""
    order.begin()
    predictions = []
    for unit in uses:
        order.use(unit)
        predictions.append("".join(order.upcoming(count)))
    return predictions


def test_first_step_predicts_nothing_and_the_second_what_the_first_did():
    order = GatherOrder()
    assert step(order, "abc") == ["", "", ""]
    assert step(order, "abc") == ["b", "c", ""]
    assert step(order, "abc", count=2) == ["bc", "c", ""]


def test_order_is_that_of_the_last_step_that_used_anything():
    order = GatherOrder()
    step(order, "abc")
    step(order, "acb")
    order.begin()
    assert step(order, "acb") == ["c", "b", ""]


def test_unit_used_twice_in_a_row_is_not_its_own_successor():
    order = GatherOrder()
    step(order, "abba")
    assert step(order, "abba") == ["b", "a", "a", ""]
    order.begin()
    repeats = []
    for unit in "abba":
        order.use(unit)
        repeats.append(order.repeats())
    assert repeats == [False, True, False, False]


def test_each_upcoming_unit_is_named_once():
    order = GatherOrder()
    step(order, "abcbd")
    order.begin()
    order.use("a")
    assert order.upcoming(3) == ["b", "c", "d"]


def test_step_that_leaves_units_out_is_followed():
    order = GatherOrder()
    step(order, "abcde")
    assert step(order, "abde") == ["b", "c", "e", ""]


def test_step_that_adds_a_unit_is_followed():
    order = GatherOrder()
    step(order, "abcd")
    assert step(order, "axbcd") == ["b", "b", "c", "d", ""]
