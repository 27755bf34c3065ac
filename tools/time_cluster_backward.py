"""Check the kernel of cluster_backward.py against float64, and print its times next to the package's.

    python tools/time_cluster_backward.py

Needs a GPU of compute capability 9.0 (H100, H200), for less than a minute, most of which compiles.
"""

import random
import statistics
import sys
from collections.abc import Callable, Iterator

import torch
import triton
from cluster_backward import cluster_backward_plan
from torch import Tensor

from cs336sys.commands.attention.measure import TOLERANCES
from cs336sys.kernels.attention.choice import backward_plan, forward_plan
from cs336sys.kernels.attention.plan import Plan
from cs336sys.kernels.attention.problem import AttentionOptions, gpu_capability
from cs336sys.kernels.attention.reference import reference_attention
from cs336sys.timing.calls import time_queued_calls
from cs336sys.timing.relative_error import Errors, relative_error, relative_errors, why_wrong

HEAD_DIM = 256
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
NUM_PROBLEMS = 40
LONGEST = 1300  # Of the random problems: twenty tiles of 64 queries, ten items of 128 keys.
# Batch, heads, length; causal or not.
TIMED = (((1, 16, 16384), False), ((1, 16, 16384), True), ((2, 12, 4096), True), ((1, 16, 8192), True))
ROUNDS = 5

MakePlan = Callable[[list[Tensor], list[Tensor], bool], Plan]


def package_plan(tensors: list[Tensor], grads: list[Tensor], is_causal: bool) -> Plan:
    return backward_plan(tensors, grads, AttentionOptions(is_causal, kernels="hopper"))


def random_inputs(
    leading: tuple[int, int], lengths: tuple[int, int], dtype: torch.dtype, is_causal: bool, device: torch.device,
    seed: int = 0, group_size: int = 1,
) -> list[Tensor]:  # fmt: skip
    """Return query, key, value, output and logsumexp as in float64, and dO; ``lengths``: of queries and keys."""
    generator = torch.Generator().manual_seed(seed)  # Of the CPU, whose numbers are the same everywhere.
    batch, heads = leading
    query, grad_out, key, value = (
        torch.randn(batch, number, length, HEAD_DIM, generator=generator).to(device, dtype)
        for number, length in zip((heads, heads // group_size), lengths, strict=True)
        for _ in range(2)
    )
    out, logsumexp = reference_attention(query, key, value, is_causal, compute_dtype=torch.float64)
    return [query, key, value, out.to(dtype), logsumexp.float(), grad_out]


def gradients_of(make_plan: MakePlan, inputs: list[Tensor], is_causal: bool) -> tuple[Callable[[], None], list[Tensor]]:
    """Plan the backward pass, and compute dQ, dK and dV; return a call that computes them again, and them."""
    query, key, value, out, _, grad_out = inputs
    grads = [torch.full_like(tensor, float("nan")) for tensor in (query, key, value)]
    plan = make_plan([query, key, value, out, grad_out], grads, is_causal)

    def call() -> None:
        plan(*inputs, *grads)

    call()
    return call, grads


def errors_of(make_plan: MakePlan, inputs: list[Tensor], is_causal: bool) -> Errors:
    """Compare gradients with those in float64."""
    _, grads = gradients_of(make_plan, inputs, is_causal)
    *operands, _, _, grad_out = inputs
    leaves = [tensor.double().requires_grad_() for tensor in operands]
    out, _ = reference_attention(*leaves, is_causal)
    names, expected = ("dQ", "dK", "dV"), torch.autograd.grad(out, leaves, grad_out.double())
    return relative_errors(dict(zip(names, grads, strict=True)), dict(zip(names, expected, strict=True)))


def check(make_plan: MakePlan, device: torch.device) -> dict[str, float]:
    """Return the largest error of a gradient by dtype, relative to its norm; exit where one is over its tolerance."""
    largest = dict.fromkeys(DTYPES, 0.0)
    for seed in range(NUM_PROBLEMS):
        dtype = list(DTYPES)[seed % 2]
        is_causal = seed // 2 % 2 == 1
        draw = random.Random(seed)
        leading = draw.randint(1, 2), draw.randint(1, 3)
        lengths = draw.randrange(1, LONGEST, 2), draw.randrange(1, LONGEST, 2)
        inputs = random_inputs(leading, lengths, DTYPES[dtype], is_causal, device, seed)
        errors = errors_of(make_plan, inputs, is_causal)
        reason = why_wrong(errors, TOLERANCES[dtype])
        if reason is not None:
            shapes = " and ".join("x".join(map(str, tensor.shape)) for tensor in inputs[:2])
            sys.exit(f"{dtype}, {'causal' if is_causal else 'full'}, queries and keys {shapes}: {reason}")
        largest[dtype] = max(largest[dtype], *(error.whole for error in errors.values()))
    return largest


def timed_rows(device: torch.device) -> Iterator[str]:
    """Time both kernels, each in turn; yield rows of a table."""
    for (batch, heads, length), is_causal in TIMED:
        shape = batch, heads, length, HEAD_DIM
        query, key, value, grad_out = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(4))
        out, logsumexp = torch.empty_like(query), torch.empty(shape[:-1], device=device)
        forward = forward_plan((query, key, value, out), AttentionOptions(is_causal, kernels="hopper"))
        forward(query, key, value, out, logsumexp)
        inputs = [query, key, value, out, logsumexp, grad_out]
        calls, grads = zip(
            *(gradients_of(make_plan, inputs, is_causal) for make_plan in (package_plan, cluster_backward_plan)),
            strict=True,
        )
        # What float64 has no memory for is compared between the two.
        pairs = zip(*grads, strict=True)
        difference = max(relative_error(ours, package.double()).whole for package, ours in pairs)
        rounds = [
            [statistics.median(time_queued_calls(call, device, 0, 0).measured) for call in calls] for _ in range(ROUNDS)
        ]
        package_ms, cluster_ms = map(statistics.median, zip(*rounds, strict=True))
        ratio = statistics.median(cluster / package for package, cluster in rounds)
        name = f"{'x'.join(map(str, shape))} {'causal' if is_causal else 'full'}"
        yield f"| {name} | {package_ms:.2f} | {cluster_ms:.2f} | {ratio:.3f} | {difference:.1e} |"


def main() -> None:
    device = torch.device("cuda")
    if not torch.cuda.is_available() or gpu_capability(device) != (9, 0):
        sys.exit("time_cluster_backward.py needs a GPU of compute capability 9.0 (H100, H200)")
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, triton {triton.__version__}")
    errors = check(cluster_backward_plan, device)
    largest = " and ".join(f"{error:.1e} of their norm in {dtype}" for dtype, error in errors.items())
    print(f"{NUM_PROBLEMS} random problems: dQ, dK and dV are off float64 by at most {largest}", flush=True)
    print("\n| bf16 | package, ms | exchange, ms | over the package | gradients differ by |\n|---|---|---|---|---|")
    for row in timed_rows(device):
        print(row, flush=True)


if __name__ == "__main__":
    main()
