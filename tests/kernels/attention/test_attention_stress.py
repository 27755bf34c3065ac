"""Random attention on a GPU from several processes at once, every element against matrix algebra in float32.

``pytest tests/kernels/attention/test_attention_stress.py -n0 -m nightly -s`` prints the largest deviation of each
result by implementation.
"""

import random
import time
import traceback
from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch

from cs336sys.kernels.attention import flash_attention, flash_attention_backward
from cs336sys.kernels.attention.reference import reference_attention

PROCESSES = 6
# Largest deviation of an element, relative to the largest element of its tensor or 1. Rounding P and dS to 8 or 11 bits
# explains these; a tile of wrong keys is off by about 1.
TOLERANCES = {torch.float32: 5e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# The reference keeps several tensors of all scores, in float64 for float32, in every process at once.
MAX_SCORES = 2**26
RESULTS = ("out", "logsumexp", "dq", "dk", "dv", "block dq", "block dk", "block dv")


@dataclass(frozen=True)
class Case:
    seed: int
    implementation: str
    dtype: torch.dtype
    batch: int
    key_heads: int
    group: int
    num_queries: int
    num_keys: int
    head_dim: int
    is_causal: bool
    window: int | None
    deterministic: bool
    rows_first: bool

    @property
    def num_scores(self) -> int:
        return self.batch * self.key_heads * self.group * self.num_queries * self.num_keys


def random_case(generator: random.Random) -> Case:
    """Draw a case until its scores fit."""
    while (case := any_case(generator)).num_scores > MAX_SCORES:
        pass
    return case


def any_case(generator: random.Random) -> Case:
    implementation = generator.choice(("auto", "auto", "triton", "hopper", "tiled"))
    is_hopper = implementation == "hopper"
    num_queries = generator.choice((1, 17, 64, 127, 300, 512, 1000, 1536, generator.randint(1, 2200)))
    is_causal = generator.random() < 0.7
    has_window = is_causal and not is_hopper and generator.random() < 0.4
    return Case(
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


def deviations(case: Case) -> dict[str, float]:
    """Of each result, the largest deviation of an element; raises where deterministic gradients do not repeat."""
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
    delta = (grad_out.float() * out.detach().float()).sum(-1)
    detached = [one.detach() for one in inputs]
    block = flash_attention_backward(*detached, grad_out, logsumexp, delta, case.is_causal, **options)

    precise = torch.float64 if case.dtype == torch.float32 else torch.float32
    leaves = [one.detach().to(precise).requires_grad_() for one in inputs]
    expected_out, expected_logsumexp = reference_attention(*leaves, case.is_causal, window=case.window)
    expected = torch.autograd.grad(expected_out, leaves, grad_out.to(precise))
    actual = out, logsumexp, *grads, *block
    result = {}
    for name, one, other in zip(RESULTS, actual, (expected_out, expected_logsumexp, *expected, *expected), strict=True):
        seen = other.isfinite()
        assert torch.equal(one.isfinite(), seen), f"{name} is not finite where it should be, or is where it should not"
        scale = other[seen].abs().max().clamp(min=1.0).item() if seen.any() else 1.0
        result[name] = ((one.to(precise) - other)[seen].abs().max().item() / scale) if seen.any() else 0.0
    return result


def tolerance(name: str, dtype: torch.dtype) -> float:
    # The logsumexp is float32 of scores that are products of the inputs as they are.
    return 5e-5 if name == "logsumexp" else TOLERANCES[dtype]


def work(seed: int, seconds: float, queue) -> None:
    """Reports (cases by implementation, {(implementation, dtype, result): (deviation, case)}, failures)."""
    generator, done, largest, failures = random.Random(seed), Counter(), {}, []
    torch.backends.cuda.matmul.allow_tf32 = False
    end = time.monotonic() + seconds
    while time.monotonic() < end and not failures:
        case = random_case(generator)
        try:
            for name, deviation in deviations(case).items():
                key = case.implementation, str(case.dtype).removeprefix("torch."), name
                largest[key] = max(largest.get(key, (0.0, "")), (deviation, str(case)))
        except Exception:
            failures.append(f"{case}\n{traceback.format_exc()}")
        done[case.implementation] += 1
    queue.put((done, largest, failures))


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
    done, largest, failures = Counter(), {}, []
    for of_worker, deviations_of_worker, failures_of_worker in reports:
        done += of_worker
        failures += failures_of_worker
        for key, found in deviations_of_worker.items():
            largest[key] = max(largest.get(key, (0.0, "")), found)
    print(f"\n{sum(done.values())} cases: {', '.join(f'{count} {name}' for name, count in sorted(done.items()))}")
    for (implementation, dtype, name), (deviation, _) in sorted(largest.items()):
        print(f"{implementation:8s} {dtype:9s} {name:10s} {deviation:.1e}")
    assert not failures, failures[0]
    wrong = {key: found for key, found in largest.items() if found[0] > tolerance(key[2], getattr(torch, key[1]))}
    assert not wrong


@pytest.mark.gpu
def test_gpu_random_attention_with_tiles_of_other_gpus(tier, settings_of_a100):
    generator = random.Random(tier.seed)
    torch.backends.cuda.matmul.allow_tf32 = False
    for _ in range(tier.choose(20, 200)):
        case = replace(random_case(generator), implementation="triton")
        for name, deviation in deviations(case).items():
            assert deviation <= tolerance(name, case.dtype), f"{name}: {case}"
