"""Peak main memory of a stretch of work, in a process that held more before."""

import json
import subprocess
import sys

import pytest

from cs336sys.machine import device

# In a process of its own: where an allocator has kept what others freed, new memory may raise no peak.
PEAKS = """
import json
from cs336sys.machine import device

def hold(mib):
    return bytearray(b"\\1" * (mib << 20))

block = [hold(400)]
del block[:]
before_gib = device.reset_peak_resident()
after_reset_gib = device.peak_resident_gib()
block.append(hold(100))
del block[:]
print(json.dumps([before_gib, after_reset_gib, device.peak_resident_gib()]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the peak of a stretch of work")
def test_a_peak_is_that_of_the_work_since_the_reset_and_not_of_the_process():
    found = subprocess.run([sys.executable, "-c", PEAKS], capture_output=True, text=True, check=True)
    before_gib, after_reset_gib, peak_gib = json.loads(found.stdout)
    assert after_reset_gib == pytest.approx(before_gib, abs=0.02), "what was held before is forgotten"
    assert 0.09 < peak_gib - before_gib < 0.25


def test_without_linux_no_peak_is_made_up(monkeypatch):
    def refused(self, text):
        raise PermissionError

    monkeypatch.setattr(device.Path, "write_text", refused)
    assert device.reset_peak_resident() is None
