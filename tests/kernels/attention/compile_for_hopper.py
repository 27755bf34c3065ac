"""Compiles the attention kernels for sm_90 on any machine, as an H200 would get them; prints what came out as JSON.

Run without TRITON_INTERPRET and with an empty TRITON_CACHE_DIR. The plans choose settings, constants and descriptors
themselves; only the driver below them is exchanged for one that compiles and does not launch.
"""

import contextlib
import dataclasses
import gc
import io
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget

from cs336sys.kernels.attention import choice, native_call
from cs336sys.kernels.attention.hopper.convert import convert_register_order_kernel, sum_pieces_kernel
from cs336sys.kernels.attention.plan import Launch, Plan
from cs336sys.kernels.attention.problem import AttentionOptions
from cs336sys.kernels.attention.triton.backward import convert_grad_query_kernel, prepare_kernel

CAPABILITY = (9, 0)
NUM_MULTIPROCESSORS = 132
MAX_SHARED_BYTES = 232448


class Configuration(NamedTuple):
    """A call of attention: (batch, heads, length, head dimension) and the options; half as many queries at the end."""

    shape: tuple[int, int, int, int]
    dtype: torch.dtype
    is_causal: bool = True
    key_heads: int | None = None
    window: int | None = None
    deterministic: bool = False
    aligned_at_end: bool = False
    kernels: str = "triton"
    float32_precision: str = "tf32x3"

    def __str__(self) -> str:
        words = ["x".join(map(str, self.shape)), str(self.dtype).removeprefix("torch.")]
        words += [f"over {self.key_heads}"] if self.key_heads else []
        words += [f"window {self.window}"] if self.window else []
        words += ["deterministic"] if self.deterministic else []
        words += [self.float32_precision] if self.float32_precision != "tf32x3" else []
        return " ".join(words)


# (shape, dtype, is_causal), and where they are not as usual, the heads of keys, the window and deterministic
TRITON_CONFIGURATIONS = {
    "head dim 16": ((1, 16, 16384, 16), torch.bfloat16, True),
    "one long head": ((1, 1, 8192, 64), torch.bfloat16, True),
}
# Compiled with the argument "all", nightly: they take two minutes. A full kernel is a causal one without its mask.
MORE_TRITON_CONFIGURATIONS = {
    "head dim 64": ((1, 16, 16384, 64), torch.bfloat16, True),
    "head dim 128": ((1, 16, 16384, 128), torch.bfloat16, True),
    "one short head": ((1, 1, 1024, 64), torch.float16, True),
    "head dim 256": ((1, 16, 4096, 256), torch.bfloat16, True),
    "one short head, head dim 128": ((1, 1, 1024, 128), torch.bfloat16, True),
    "float32": ((1, 16, 8192, 64), torch.float32, True),
    "float32, one head": ((1, 1, 4096, 32), torch.float32, True),
    "grouped window, head dim 128": ((1, 16, 16384, 128), torch.bfloat16, True, 4, 1024),
    "head dim 64 full": ((1, 16, 16384, 64), torch.bfloat16, False),
    "grouped, head dim 16": ((1, 16, 16384, 16), torch.bfloat16, True, 4),
    "grouped, head dim 64": ((1, 16, 16384, 64), torch.bfloat16, True, 4),
    "grouped, head dim 128": ((1, 16, 16384, 128), torch.bfloat16, True, 4),
    "grouped, head dim 256": ((1, 16, 4096, 256), torch.bfloat16, True, 4),
    "window, head dim 16": ((1, 16, 16384, 16), torch.bfloat16, True, 16, 1024),
    "window, head dim 64": ((1, 16, 16384, 64), torch.bfloat16, True, 16, 1024),
    "window, head dim 128": ((1, 16, 16384, 128), torch.bfloat16, True, 16, 1024),
    "window, head dim 256": ((1, 16, 4096, 256), torch.bfloat16, True, 16, 1024),
    "grouped window, short": ((1, 4, 512, 64), torch.bfloat16, True, 1, 128),
    "grouped window, short, head dim 128": ((1, 4, 512, 128), torch.bfloat16, True, 1, 128),
    "grouped window, 4096": ((1, 16, 4096, 64), torch.float16, True, 4, 512),
}


def hopper_configurations(head_dims_by_kind: dict[str, Sequence[int]]) -> dict[str, tuple]:
    """Of 16 heads, four of them of keys where they are "grouped", which are cut into pieces unless they are long."""
    configurations = {}
    for kind, head_dims in head_dims_by_kind.items():
        is_full, is_grouped = "full" in kind, "grouped" in kind
        length = 2048 if is_grouped and "uncut" not in kind else 16384
        dtype = torch.float16 if is_full and not is_grouped else torch.bfloat16
        options = (
            4 if is_grouped else None,
            1024 if "window" in kind else None,
            "deterministic" in kind,
            "at the end" in kind,
        )
        for head_dim in head_dims:
            name = f"hopper, head dim {head_dim} {kind}".rstrip()
            configurations[name] = ((1, 16, length, head_dim), dtype, not is_full, *options)
    return configurations


HOPPER_CONFIGURATIONS = hopper_configurations({"grouped": [128]})
# Compiled with the argument "all"; those of head dimension 64 take turns only if they are causal.
MORE_HOPPER_CONFIGURATIONS = hopper_configurations(
    {
        "": [16, 32, 64, 128, 256],
        "full": [32, 64, 128, 256],
        "deterministic": [64, 128, 256],
        "window": [16, 32, 64, 128, 256],
        "grouped window": [64, 128, 256],
        "window deterministic": [64, 128],
        "grouped": [16, 32, 64, 256],
        "grouped full": [64, 128, 256],
        "grouped uncut": [64, 128, 256],
        "grouped deterministic": [64, 128, 256],
        "grouped full deterministic": [128],
        "at the end": [32, 64, 128, 256],
        "grouped at the end": [128],
        "at the end deterministic": [128],
    }
) | {"hopper, head dim 128 full uncut": ((8, 16, 2048, 128), torch.float16, False)}


class CompileOnlyDriver:
    class utils:
        @staticmethod
        def load_binary(name, cubin, shared_bytes, device):
            return None, None, 0, 0, 1024

        @staticmethod
        def get_device_properties(device):
            return {"max_shared_mem": MAX_SHARED_BYTES}

    class launcher_cls:
        def __init__(self, source, metadata):
            pass

        def __call__(self, *args):
            pass

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 10 * CAPABILITY[0] + CAPABILITY[1], 32)


def describe(compiled: triton.compiler.CompiledKernel, ptxas_log: str) -> dict:
    """What ptxas says of a kernel."""
    return {
        "registers": int(re.search(r"Used (\d+) registers", ptxas_log)[1]),
        "spilled_bytes": int(re.search(r"(\d+) bytes spill stores", ptxas_log)[1]),
        "serialized": "serialized" in ptxas_log,
        "reallocates_registers": "setmaxnreg" in compiled.asm["ptx"],
        "limited": compiled.metadata.maxnreg is not None,
        "num_warps": compiled.metadata.num_warps,
        "shared_bytes": compiled.metadata.shared,
    }


def describe_code(sass: str) -> dict:
    """How often a kernel's disassembly has the instructions that matter."""
    return {
        "tensor_core": len(re.findall(r"\bHG?MMA\.", sass)),
        "exp2_beside_product": exp2_beside_product(sass),
        "tma_load": len(re.findall(r"\bUTMALDG\.", sass)),
        "touched_early": touched_early(sass),
        "vector_reduce": len(re.findall(r"\bREDG?\.\S*F32x4", sass)),
        "tma_reduce": len(re.findall(r"\bUTMAREDG\.", sass)),
    }


def disassemble(cubins: Iterable[bytes]) -> Iterator[str]:
    """Give the code of each."""

    def code_of(cubin):
        with tempfile.NamedTemporaryFile() as file:
            file.write(cubin)
            file.flush()
            # Without looking for where jumps may lead, which takes half as long again.
            command = [triton.knobs.nvidia.nvdisasm.path, "--no-dataflow", file.name]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    with ThreadPoolExecutor() as threads:
        return threads.map(code_of, cubins)


def exp2_beside_product(sass: str) -> list[int]:
    """Exponentials between a wait that leaves one product running and the next wait, where there are any."""
    _, *stretches = re.split(r"WARPGROUP\.DEPBAR\.LE gsb0, ", sass)
    counts = [stretch.count("MUFU.EX2") for stretch in stretches if stretch.startswith("0x1")]
    return [count for count in counts if count]


INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([\w.]+)\s*(.*?);")
WITHOUT_RESULT = ("ST", "RED", "WARPGROUP", "BAR", "BRA", "UTMA", "SYNCS", "ISETP", "FSETP", "PLOP", "R2UR", "MEMBAR")


def touched_early(sass: str) -> list[str]:
    """Instructions that write a left operand in registers, or use the sums, of a product that may still be running.

    In the order of the listing: products that are committed together end together, and a wait leaves the last n.
    """
    running: list[list[tuple[set[int], set[int]]]] = [[]]
    found = []
    for instruction in INSTRUCTION.finditer(sass):
        name, operands = instruction[1], instruction[2].split(", ")
        used = [int(number) for number in re.findall(r"\bR(\d+)\b", instruction[2])]
        if name.startswith("HGMMA"):
            columns = int(re.search(r"\.64x(\d+)x", name)[1])
            left = re.match(r"R(\d+)", operands[1])
            first = int(operands[0].removeprefix("R"))
            lefts = set() if left is None else set(range(int(left[1]), int(left[1]) + 4))
            running[-1].append((lefts, set(range(first, first + columns // 2))))
            if "gsb0" in operands[-1]:
                running.append([])
        elif name.startswith("WARPGROUP.DEPBAR"):
            # The last is what is not committed yet.
            running = running[-1 - int(operands[-1], 16) :]
        else:
            width = next((n for suffix, n in ((".128", 4), (".64", 2), (".WIDE", 2)) if suffix in name), 1)
            has_result = re.match(r"R\d", operands[0]) and not name.startswith(WITHOUT_RESULT)
            written = set(range(used[0], used[0] + width)) if has_result else set()
            products = [product for committed in running for product in committed]
            if any(written & lefts or (written | set(used)) & sums for lefts, sums in products):
                found.append(instruction[0])
    return found


# In the place of the C++, which is not compiled here.
NATIVE = SimpleNamespace(Descriptor=lambda *_: "descriptor", Launch=lambda *_: "launch")
refused_by_native_call = []

# By the hash of the kernel: configurations share some, and ptxas sees each once.
descriptions = {}
cubins = {}


def compile_plan_step(launch: Launch, *tensors) -> triton.compiler.CompiledKernel:
    launch(*tensors)
    return launch.compiled


def compile_and_describe(compile_kernel: Callable[..., triton.compiler.CompiledKernel], *args, **kwargs) -> dict:
    """What is known so far: the code of all is looked at together, in the end."""
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        compiled = compile_kernel(*args, **kwargs)
    if compiled.hash not in descriptions:
        descriptions[compiled.hash] = describe(compiled, log.getvalue())
        cubins[compiled.hash] = compiled.asm["cubin"]
    return descriptions[compiled.hash]


def compile_steps(plan: Plan, names: list[str | None], report: dict, *tensors: torch.Tensor) -> None:
    """Runs a plan, and describes under its name in ``report`` what it compiles for each of its steps that has one.

    Every step, named or not, must be one that the C++ of native_call knows how to launch.
    """
    steps = plan.steps

    def described(launch, name):
        return lambda *tensors: report.update({name: compile_and_describe(compile_plan_step, launch, *tensors)})

    plan.steps = [
        (described(launch, name) if name else launch, slots) for name, (launch, slots) in zip(names, steps, strict=True)
    ]
    plan(*tensors)
    for launch, slots in steps:
        try:
            native_call.translate_launch(NATIVE, launch, slots)
        except native_call.UnknownLaunchError as error:
            refused_by_native_call.append(f"{launch._kernel.__name__}: {error}")


def plans_with_tensors(configuration: Configuration) -> Iterator[tuple[Plan, tuple[torch.Tensor, ...]]]:
    """The forward and the backward plan of a call, each with its tensors, which are neither read nor written."""
    shape, dtype, is_causal, key_heads, window, deterministic, at_end, kernels, float32_precision = configuration
    of_queries = (*shape[:2], shape[2] // 2 if at_end else shape[2], shape[3])
    # One element that all strides but the last lead to would be addressed as no tensor is.
    query, out, grad_out, grad_query = (torch.empty(of_queries, dtype=dtype) for _ in range(4))
    key, value, *grads = (torch.empty(shape[0], key_heads or shape[1], *shape[2:], dtype=dtype) for _ in range(4))
    options = AttentionOptions(is_causal, float32_precision, deterministic, kernels, window, aligned_at_end=at_end)
    tensors, grads = (query, key, value, out, torch.empty(of_queries[:-1])), (grad_query, *grads)
    yield choice.forward_plan(tensors[:4], options), tensors
    yield choice.backward_plan((*tensors[:4], grad_out), grads, options), (*tensors, grad_out, *grads)


def compile_configuration(configuration: Configuration) -> dict[str, dict]:
    (forward, tensors), (backward, tensors_of_both) = plans_with_tensors(configuration)
    report = {}
    compile_steps(forward, ["forward", "combine"][: len(forward.steps)], report, *tensors)
    passes = [launch._kernel for launch, _ in backward.steps]
    others = prepare_kernel, convert_grad_query_kernel, convert_register_order_kernel, sum_pieces_kernel
    names = iter(["backward"] if sum(one not in others for one in passes) == 1 else ["grad_key_value", "grad_query"])
    compile_steps(backward, [None if one in others else next(names) for one in passes], report, *tensors_of_both)
    return report


def main() -> None:
    # Of what compiling makes nothing lies in cycles: to look for those takes 5 % of the time.
    gc.disable()
    triton.runtime.driver.set_active(CompileOnlyDriver())
    triton.knobs.nvidia.dump_ptxas_log = True
    problem_on_this_machine = choice.make_problem

    def problem_on_hopper(query, key, operands, options):
        return dataclasses.replace(
            problem_on_this_machine(query, key, operands, options),
            capability=CAPABILITY,
            num_multiprocessors=NUM_MULTIPROCESSORS,
            tma_allowed=all(operand.fits_tma for operand in operands),
        )

    choice.make_problem = problem_on_hopper
    reports = {}
    plain = TRITON_CONFIGURATIONS | (MORE_TRITON_CONFIGURATIONS if "all" in sys.argv else {})
    hopper = HOPPER_CONFIGURATIONS | (MORE_HOPPER_CONFIGURATIONS if "all" in sys.argv else {})
    for kernels, configurations in (("triton", plain), ("hopper", hopper)):
        for name, configuration in configurations.items():
            # The other kernels print their ptxas log as well.
            with contextlib.redirect_stdout(sys.stderr):
                reports[name] = compile_configuration(Configuration(*configuration)._replace(kernels=kernels))
            if "combine" in reports[name]:
                reports["combine"] = {"combine": reports[name].pop("combine")}
    for name, sass in zip(cubins, disassemble(cubins.values()), strict=True):
        descriptions[name].update(describe_code(sass))
    json.dump({"kernels": reports, "refused by native_call": refused_by_native_call}, sys.stdout)


if __name__ == "__main__":
    main()
