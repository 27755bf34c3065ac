"""What kernels refuse and what they choose by a shape, written down in ``figures.txt`` (tests/written_figures.py).

Other tests compute; here nothing is launched.
"""

# Further names are used in figures.txt.
# ruff: noqa: F401

import contextlib
import math

import torch
from attention.attention_checks import problem_on_h200
from torch.utils.flop_counter import FlopCounterMode
from written_figures import figures_test

from cs336sys.kernels import linear_cross_entropy as cross_entropy
from cs336sys.kernels.adamw import AdamW
from cs336sys.kernels.attention import IMPLEMENTATIONS, flash_attention, flash_attention_backward
from cs336sys.kernels.attention.hopper import schedule
from cs336sys.kernels.attention.hopper.plans import HopperBackwardPlan
from cs336sys.kernels.attention.hopper.settings import hopper_backward_is_faster, hopper_forward_is_faster
from cs336sys.kernels.attention.operators import FlashAttentionTriton, _option_number, forward_flops
from cs336sys.kernels.attention.problem import Operand, check_attention_inputs
from cs336sys.kernels.attention.reference import FlashAttentionTorch, plain_attention, reference_attention
from cs336sys.kernels.attention.triton.settings import backward_settings, forward_settings
from cs336sys.kernels.linear_cross_entropy import linear_cross_entropy
from cs336sys.kernels.rms_norm import rms_norm
from cs336sys.kernels.rope import rope, rope_qkv
from cs336sys.kernels.swiglu import swiglu, swiglu_linear_of_copy
from cs336sys.kernels.weighted_sum import weighted_sum

F16, F32, BF16 = torch.float16, torch.float32, torch.bfloat16
ones = torch.ones
PREDICTED = {"hidden": ones(2, 3), "weight": ones(5, 3), "targets": torch.zeros(2, dtype=torch.int64)}
ONE = torch.nn.Parameter(ones(4))
OPTIMIZER = AdamW([ONE])
PLAIN_ATTENTIONS = (check_attention_inputs, plain_attention, reference_attention, FlashAttentionTorch.apply)


def refusal(function, *arguments, **settings):
    """Return the kind and the sentence of a refusal, or what the function returns."""
    try:
        return function(*arguments, **settings)
    except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"


def alike(refusals):
    """Return the one sentence of several functions, or all that differ."""
    sentences = list(dict.fromkeys(refusals))
    return sentences[0] if len(sentences) == 1 else sentences


def step_with(gradient):
    parameter = torch.nn.Parameter(ones(4))
    parameter.grad = gradient
    AdamW([parameter]).step()


def grouped(heads, key_heads, queries=8, keys=8, dtype=F32):
    shapes = (heads, queries), (key_heads, keys), (key_heads, keys)
    return [ones(2, *shape, 16, dtype=dtype) for shape in shapes]


def refused_by_every_implementation(heads=2, key_heads=2, **options):
    inputs, options = grouped(heads, key_heads), {"is_causal": True} | options
    return alike(refusal(flash_attention, *inputs, **options, implementation=name) for name in IMPLEMENTATIONS)


def refused_backward(keys=8, **options):
    """Also in a mode of PyTorch's that sees operators."""
    query, key, value = grouped(2, 1, keys=keys)
    statistics = {"grad_out": query, "logsumexp": query[..., 0], "delta": query[..., 0]} | options
    refusals = []
    for mode in (contextlib.nullcontext(), FlopCounterMode(display=False)):
        with mode:
            refusals.append(refusal(flash_attention_backward, query, key, value, **statistics))
    return alike(refusals)


def dtype_of_sums(weight, logits, shape, chunks):
    """Return the dtype in which the weight's gradient is summed over chunks of logits."""
    tokens = (chunks - 1) * cross_entropy.CHUNK_BYTES // cross_entropy.logits_bytes_of_a_token(shape[0], logits) + 1
    options, kept = cross_entropy.LossOptions(-100, 0, 0, logits, True, True), cross_entropy.kept_dtype(weight, logits)
    weights = torch.empty(shape, dtype=weight, device="meta")
    return cross_entropy._allocate_grad_weight(weights, kept, tokens, options)[0].dtype


def hopper_is_faster(*shape, **options):
    """Return whether ``auto`` takes the Hopper kernels forward and backward."""
    described = problem_on_h200(*shape, **options)
    return hopper_forward_is_faster(described), hopper_backward_is_faster(described)


def backward_programs(num_heads, length, head_dim, deterministic=False, **options):
    """Return the programs of each launch of a Hopper backward of one batch, and the rows of its schedule."""
    described = problem_on_h200(num_heads, length, head_dim, **options)
    heads = described.num_sequences, described.num_key_sequences
    shapes = [(1, number, length, head_dim) for number in heads]
    of_queries, of_keys = (Operand(torch.empty(shape, dtype=BF16, device="meta")) for shape in shapes)
    tensors, cpu = (of_queries, of_keys, of_keys), torch.device("cpu")
    plan = HopperBackwardPlan(described, (*tensors, of_queries), of_queries, tensors, cpu, deterministic)
    (table,) = (addition for addition in plan.additions if isinstance(addition, torch.Tensor))
    return [launch.num_programs for launch, _ in plan.steps], len(table)


test_figures_are_those_written_down = figures_test(globals())
