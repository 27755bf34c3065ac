"""Checks of what this machine has and lacks for cs336sys, with the fix of each lack."""

from cs336sys.machine.diagnosis import software
from cs336sys.machine.diagnosis.software import Check
from cs336sys.machine.system import installed_version, read_gpus


def diagnose() -> list[Check]:
    """Return all checks that apply to this machine, in the order to read and fix them.

    Starts a few short-lived processes (nvidia-smi, compilers, Triton probes), each with a time limit.
    """
    checks = [software.check_python(), software.check_torch()]
    if checks[-1].verdict == "missing":
        return checks  # The other checks need torch.
    from cs336sys.machine.diagnosis import gpu

    checks += [*gpu.check_devices(read_gpus()), software.check_triton()]
    if installed_version("triton") is not None:
        checks += [*gpu.check_triton_kernel(), software.check_triton_interpreter()]
    checks.append(software.check_compiler())
    if installed_version("triton") is not None:
        checks += software.check_attention()
    checks += [*software.check_nsys(), software.check_ncu()]
    return checks + software.check_host()
