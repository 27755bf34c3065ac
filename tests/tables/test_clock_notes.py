"""What is said below a table about the GPU's clock."""

from cs336sys.commands.bench.tables import clock_notes, joined_readings, median_clock
from cs336sys.results.model import Cell, Run


def cell(clocks, limits=None, degrees=60):
    count = len(clocks)
    readings = {
        "time_s": [0.05 * number for number in range(count)],
        "sm_clock_mhz": clocks,
        "temperature_c": [degrees] * count,
        "power_w": [500.0] * count,
        "clock_limits": limits or [""] * count,
    }
    return Cell("bench", {}, "ok", {}, {"gpu_readings": readings})


STEADY = cell([345, 1980, 1980, 1965])
CPU = Cell("bench", {}, "ok", {}, {"gpu_readings": None})
EARLIER_VERSION = Cell("bench", {}, "ok", {}, {})


def test_a_steady_clock_one_that_rises_and_none_need_no_note():
    assert clock_notes([STEADY, CPU, EARLIER_VERSION, cell([])]) == ()
    assert [median_clock(one) for one in (STEADY, CPU, EARLIER_VERSION, cell([None]))] == [1972.5, None, None, None]


def test_a_clock_somebody_has_set_needs_no_note():
    assert clock_notes([cell([1500, 1500], ["application clocks", "application clocks"])]) == ()


def test_a_clock_that_fell_is_told_with_how_far_and_how_hot():
    assert clock_notes([STEADY, cell([345, 1980, 1900, 1410], degrees=83), cell([1980, 1900])]) == (
        "clocks: the SM clock fell in 2 of 3 cells, from 1980 to 1410 MHz, at up to 83 °C; steadier: --cool-down, or "
        "nvidia-smi --lock-gpu-clocks",
    )


def test_limit_of_a_clock_is_named_even_where_it_did_not_fall():
    capped = cell([1700] * 4, ["power cap", "power cap, sync boost", "", "power cap"])
    (note,) = clock_notes([capped, STEADY])
    assert note.startswith("clocks: power cap in 1 of 2 cells (up to 75 % of the readings), at up to 60 °C; ")


def test_the_clock_that_a_limit_costs_is_told_where_the_limit_of_the_clock_is_known():
    run = Run("a", "", (), {}, {"gpu0_max_sm_clock_mhz": 1980.0})
    capped = cell([1980, 1485, 1500, 1470], ["", "power cap", "power cap", "power cap"])
    (note,) = clock_notes([capped, STEADY], run)
    assert "(up to 75 % of the readings, the SM clock 25 % below its limit)" in note


def test_rounds_are_read_one_after_another():
    joined = joined_readings([STEADY, CPU, cell([1500])])
    assert joined["sm_clock_mhz"] == [345, 1980, 1980, 1965, 1500]
    assert joined_readings([CPU, EARLIER_VERSION]) is None
