"""What connects GPUs to each other, in words: it decides what every collective can reach."""

import functools
import re
from collections.abc import Sequence
from itertools import combinations

from cs336sys.measure.diagnosis.gpu import read_links
from cs336sys.measure.system import read_gpus, run_tool


@functools.cache
def describe_links(uuids: Sequence[str]) -> str:
    """The links between these GPUs of this machine as ``nvidia-smi topo -m`` names them, with the sum of the NVLinks.

    Args:
        uuids: a tuple of GPU UUIDs, as of :class:`cs336sys.measure.system.GpuState`.

    Returns:
        ``NV18 (18 NVLinks, 478 GB/s each way)``, ``PIX``, ``SYS``, several where pairs differ, or ``unknown links``.
    """
    indices = sorted(gpu.index for gpu in read_gpus() if gpu.uuid in uuids)
    links = read_links(run_tool(["nvidia-smi", "topo", "-m"]) or "")
    names = sorted({links[pair] for pair in combinations(indices, 2) if pair in links})
    if not names:
        return "unknown links"
    described = ", ".join(names)
    if any(name.startswith("NV") for name in names):
        status = run_tool(["nvidia-smi", "nvlink", "--status", "-i", str(indices[0])]) or ""
        speeds = [float(speed) for speed in re.findall(r"Link \d+: ([\d.]+) GB/s", status)]
        if speeds:
            described += f" ({len(speeds)} NVLinks, {sum(speeds):.0f} GB/s each way)"
    return described
