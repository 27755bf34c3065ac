"""Peak main memory of a stretch of work, in a process that held more before."""

import gc
import sys

import pytest

from cs336sys.measure import memory


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the peak of a stretch of work")
def test_a_peak_is_that_of_the_work_since_the_reset_and_not_of_the_process():
    def hold(mib):
        return bytearray(b"\1" * (mib << 20))

    # What other tests have left must not be freed meanwhile.
    gc.collect()
    block = [hold(400)]
    del block[:]
    before_gib = memory.reset_peak_resident()
    assert memory.peak_resident_gib() == pytest.approx(before_gib, abs=0.02), "what was held before is forgotten"
    block.append(hold(100))
    del block[:]
    grown_gib = memory.peak_resident_gib() - before_gib
    assert 0.09 < grown_gib < 0.25


def test_without_linux_no_peak_is_made_up(monkeypatch):
    def refused(self, text):
        raise PermissionError

    monkeypatch.setattr(memory.Path, "write_text", refused)
    assert memory.reset_peak_resident() is None
