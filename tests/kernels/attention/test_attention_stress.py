"""Random attention on a GPU from several processes at once, every element against matrix algebra in float64."""

import random
import time
import traceback
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from attention_checks import TOLERANCES, assert_close_to_float64

from cs336sys.kernels.attention import flash_attention, flash_attention_backward

PROCESSES = 6
# The reference keeps several tensors of all scores in float64, in every process at once.
MAX_SCORES = 2**26


def random_case(generator: random.Random) -> SimpleNamespace:
    """Draw a case until its scores fit."""
    while True:
        case = any_case(generator)
        if case.batch * case.key_heads * case.group * case.num_queries * case.num_keys <= MAX_SCORES:
            return case


def any_case(generator: random.Random) -> SimpleNamespace:
    implementation = generator.choice(("auto", "auto", "triton", "hopper", "tiled"))
    is_hopper = implementation == "hopper"
    num_queries = generator.choice((1, 17, 64, 127, 300, 512, 1000, 1536, generator.randint(1, 2200)))
    is_causal = generator.random() < 0.7
    has_window = is_causal and not is_hopper and generator.random() < 0.4
    return SimpleNamespace(
        seed=generator.randrange(2**31),
        implementation=implementation,
        dtype=generator.choice((torch.bfloat16, torch.float16) if is_hopper else tuple(TOLERANCES)),
        batch=generator.choice((1, 2, 3)),
        key_heads=generator.choice((1, 2, 4, 9)),
        group=generator.choice((1, 1, 2, 5)),
        num_queries=num_queries,
        num_keys=num_queries if generator.random() < 0.6 else generator.randint(1, 1500),
        head_dim=generator.choice((16, 32, 64, 128, 256) if is_hopper else (16, 24, 32, 64, 80, 128, 256)),
        is_causal=is_causal,
        window=generator.choice((1, 31, 64, 200, 1024)) if has_window else None,
        deterministic=generator.random() < 0.3,
        rows_first=generator.random() < 0.5,
    )


def check(case: SimpleNamespace) -> None:
    """Raise where a result is off, or where deterministic gradients do not repeat."""
    generator = torch.Generator("cuda").manual_seed(case.seed)

    def tensor(heads: int, length: int) -> torch.Tensor:
        shape = (case.batch, length, heads) if case.rows_first else (case.batch, heads, length)
        made = torch.randn(*shape, case.head_dim, device="cuda", dtype=case.dtype, generator=generator)
        return made.transpose(1, 2) if case.rows_first else made

    heads = case.key_heads * case.group
    shapes = (heads, case.num_queries), (case.key_heads, case.num_keys), (case.key_heads, case.num_keys)
    inputs = [tensor(*shape).requires_grad_() for shape in shapes]
    grad_out = tensor(heads, case.num_queries)
    options = {"window": case.window, "deterministic": case.deterministic, "implementation": case.implementation}
    # The second call reaches the kernels another way than the first.
    for _ in range(2):
        out, logsumexp = flash_attention(*inputs, case.is_causal, return_logsumexp=True, **options)
        grads = torch.autograd.grad(out, inputs, grad_out, retain_graph=True)
    if case.deterministic:
        again = torch.autograd.grad(out, inputs, grad_out)
        assert all(map(torch.equal, grads, again)), "deterministic gradients differ from call to call"
    assert_close_to_float64((out, logsumexp, *grads), inputs, case.is_causal, case.window, grad_out)
    delta = (grad_out.float() * out.detach().float()).sum(-1)
    detached = [one.detach() for one in inputs]
    block = flash_attention_backward(*detached, grad_out, logsumexp, delta, case.is_causal, **options)
    for name, one, other in zip(("dq", "dk", "dv"), block, grads, strict=True):
        largest = other.abs().max().clamp(min=1.0).item()
        assert (one - other).abs().max().item() <= TOLERANCES[case.dtype] * largest, f"block {name}"


def work(seed: int, seconds: float, queue) -> None:
    """Report how many cases of each implementation were checked, and what failed."""
    generator, done, failures = random.Random(seed), Counter(), []
    torch.backends.cuda.matmul.allow_tf32 = False
    end = time.monotonic() + seconds
    while time.monotonic() < end and not failures:
        case = random_case(generator)
        try:
            check(case)
        except Exception:
            failures.append(f"{case}\n{traceback.format_exc()}")
        done[case.implementation] += 1
    queue.put((done, failures))


@pytest.mark.gpu
def test_gpu_random_attention_from_several_processes(tier):
    seconds = tier.choose(20, 600)
    context = torch.multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    workers = [context.Process(target=work, args=(tier.seed + n, seconds, queue)) for n in range(PROCESSES)]
    for worker in workers:
        worker.start()
    reports = [queue.get() for _ in workers]
    for worker in workers:
        worker.join()
    print(f"\nchecked: {sum((done for done, _ in reports), Counter())}")
    failures = [failure for _, failures_of_worker in reports for failure in failures_of_worker]
    assert not failures, failures[0]


@pytest.mark.gpu
def test_gpu_random_attention_with_tiles_of_other_gpus(tier, settings_of_a100):
    generator = random.Random(tier.seed)
    torch.backends.cuda.matmul.allow_tf32 = False
    for _ in range(tier.choose(20, 200)):
        case = random_case(generator)
        case.implementation = "triton"
        check(case)
