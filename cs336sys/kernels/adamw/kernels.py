"""The kernels of AdamW. They find the tensors through a table of addresses, so that one launch updates them all.

A program takes a chunk of a parameter; ``chunks_ptr`` has two numbers a chunk: its row in that table, its place there.
"""

import math
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

# Rows of the table and sums of squares that the preparing program takes at once.
ROW_TILE = 512
SUM_TILE = 8192

# The fewest that pass all of BigCrush (Salmon et al. 2011, https://doi.org/10.1145/2063384.2063405, table 2).
PHILOX_ROUNDS = tl.constexpr(7)

# Columns of the table of tensors, int64. OTHER: low bits of a split weight, or a copy of the weight; NUMBER: the
# parameter's place in the optimizer; ALIGNED: 1 if all addresses are multiples of 16.
COLUMNS = ("WEIGHT", "GRADIENT", "EXP_AVG", "EXP_AVG_SQ", "OTHER", "STEP", "NUM_ELEMENTS", "NUMBER", "GROUP", "ALIGNED")
NUM_COLUMNS = tl.constexpr(len(COLUMNS))
WEIGHT, GRADIENT, EXP_AVG, EXP_AVG_SQ, OTHER, STEP, NUM_ELEMENTS, NUMBER, GROUP, ALIGNED = map(
    tl.constexpr, range(len(COLUMNS))
)

# Columns of the table of groups, float64.
SETTINGS = ("lr", "beta1", "beta2", "eps", "weight_decay")
NUM_SETTINGS = tl.constexpr(len(SETTINGS))

# Factors of a tensor in this step, float32: 1 - lr * weight_decay, lr / (1 - beta1^t), 1 / sqrt(1 - beta2^t), eps,
# 1 - beta1, beta2, 1 - beta2.
NUM_FACTORS = tl.constexpr(7)

# How weights are kept: in float32, of which a copy in 16 bits may be written; in bfloat16, rounded stochastically; as
# bfloat16 and what a float32 weight has beyond it.
FLOAT32, BFLOAT16, SPLIT = map(tl.constexpr, range(3))


@dataclass(frozen=True)
class UpdateConfig:
    """Properties that the parameters of one launch share, and the elements of a program and of half a tile.

    ``weights``: FLOAT32, BFLOAT16 or SPLIT; ``copy_dtype``: of the copy of a float32 weight, or None.
    """

    gradient_dtype: tl.dtype
    bfloat16_moments: bool
    weights: int
    copy_dtype: tl.dtype | None
    clipped: bool
    chunk: int
    half_tile: int


@triton.jit
def _pointers(address, offset, DTYPE: tl.constexpr, VECTORS: tl.constexpr):
    pointer = address.to(tl.pointer_type(DTYPE))
    if VECTORS:  # What is at the address is aligned: ALIGNED.
        pointer = tl.multiple_of(pointer, 16)
    return pointer + offset


@triton.jit
def _round_stochastically(x, random_bits):
    """Round to bfloat16, up with the probability of the fraction cut off; of ``random_bits``, uint32, 16 count."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = ((bits + (random_bits & 0xFFFF)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return tl.where(x == x, rounded, x).to(tl.bfloat16)  # NaN stays NaN.


@triton.jit
def _load_moment(address, offset, mask, IN_BFLOAT16: tl.constexpr, VECTORS: tl.constexpr):
    dtype: tl.constexpr = tl.bfloat16 if IN_BFLOAT16 else tl.float32
    return tl.load(_pointers(address, offset, dtype, VECTORS), mask=mask).to(tl.float32)


@triton.jit
def _store_moment(address, offset, mask, moment, random_bits, IN_BFLOAT16: tl.constexpr, VECTORS: tl.constexpr):
    if IN_BFLOAT16:
        rounded = _round_stochastically(moment, random_bits)
        tl.store(_pointers(address, offset, tl.bfloat16, VECTORS), rounded, mask=mask)
    else:
        tl.store(_pointers(address, offset, tl.float32, VECTORS), moment, mask=mask)


@triton.jit
def _update(
    addresses, factors, clip, offset, mask, moment_bits, weight_bits, VECTORS: tl.constexpr, CONFIG: tl.constexpr
):
    """Update half a tile of one parameter; the random bits round its moments and its weight."""
    weight_address, gradient_address, exp_avg_address, exp_avg_sq_address, other_address = addresses
    BFLOAT16_MOMENTS: tl.constexpr = CONFIG.bfloat16_moments
    COPY_DTYPE: tl.constexpr = CONFIG.copy_dtype
    weight_share, step_size, inverse_root, eps, exp_avg_share, exp_avg_sq_decay, exp_avg_sq_share = factors

    gradient_pointers = _pointers(gradient_address, offset, CONFIG.gradient_dtype, VECTORS)
    gradient = tl.load(gradient_pointers, mask=mask).to(tl.float32) * clip
    exp_avg = _load_moment(exp_avg_address, offset, mask, BFLOAT16_MOMENTS, VECTORS)
    exp_avg_sq = _load_moment(exp_avg_sq_address, offset, mask, BFLOAT16_MOMENTS, VECTORS)
    if CONFIG.weights == SPLIT:
        high_pointers = _pointers(weight_address, offset, tl.int16, VECTORS)
        low_pointers = _pointers(other_address, offset, tl.int16, VECTORS)
        high = tl.load(high_pointers, mask=mask).to(tl.int32)
        low = tl.load(low_pointers, mask=mask).to(tl.int32)
        weight = ((high << 16) + low).to(tl.float32, bitcast=True)
    elif CONFIG.weights == BFLOAT16:
        weight_pointers = _pointers(weight_address, offset, tl.bfloat16, VECTORS)
        weight = tl.load(weight_pointers, mask=mask).to(tl.float32)
    else:
        weight_pointers = _pointers(weight_address, offset, tl.float32, VECTORS)
        weight = tl.load(weight_pointers, mask=mask)

    # Fused where it says so and nowhere else: all variants of this kernel must give the same bits.
    exp_avg = tl.fma(exp_avg_share, gradient - exp_avg, exp_avg)
    exp_avg_sq = tl.fma(exp_avg_sq_share * gradient, gradient, exp_avg_sq_decay * exp_avg_sq)
    denominator = tl.fma(tl.sqrt(exp_avg_sq), inverse_root, eps)
    weight = tl.fma(weight_share, weight, -(step_size * exp_avg) / denominator)

    _store_moment(exp_avg_address, offset, mask, exp_avg, moment_bits, BFLOAT16_MOMENTS, VECTORS)  # 16 bits count.
    _store_moment(exp_avg_sq_address, offset, mask, exp_avg_sq, moment_bits >> 16, BFLOAT16_MOMENTS, VECTORS)
    if CONFIG.weights == SPLIT:
        bits = weight.to(tl.int32, bitcast=True)
        # To the nearest, ties away from zero; what is left over fits in 16 bits with a sign.
        high = (bits + 0x8000) >> 16
        low = bits - (high << 16)
        is_nan = weight != weight
        tl.store(high_pointers, tl.where(is_nan, 0x7FC0, high).to(tl.int16), mask=mask)  # A NaN of bfloat16.
        tl.store(low_pointers, tl.where(is_nan, 0, low).to(tl.int16), mask=mask)
    elif CONFIG.weights == BFLOAT16:
        tl.store(weight_pointers, _round_stochastically(weight, weight_bits), mask=mask)
    else:
        tl.store(weight_pointers, weight, mask=mask)
        if COPY_DTYPE is not None:
            tl.store(_pointers(other_address, offset, COPY_DTYPE, VECTORS), weight.to(COPY_DTYPE), mask=mask)


@triton.jit
def _update_chunk(row_ptr, factor_ptr, clip, start, VECTORS: tl.constexpr, CONFIG: tl.constexpr):
    """Update a chunk of the parameter in a row of the table, from element ``start`` on; VECTORS: 128 bits at a time."""
    HALF_TILE: tl.constexpr = CONFIG.half_tile
    RANDOM: tl.constexpr = CONFIG.bfloat16_moments or CONFIG.weights == BFLOAT16
    # Before the loop, whose stores might be to these tables for all that the compiler knows.
    addresses = (
        tl.load(row_ptr + WEIGHT),
        tl.load(row_ptr + GRADIENT),
        tl.load(row_ptr + EXP_AVG),
        tl.load(row_ptr + EXP_AVG_SQ),
        tl.load(row_ptr + OTHER),
    )
    factors = (  # As _update() unpacks them.
        tl.load(factor_ptr),
        tl.load(factor_ptr + 1),
        tl.load(factor_ptr + 2),
        tl.load(factor_ptr + 3),
        tl.load(factor_ptr + 4),
        tl.load(factor_ptr + 5),
        tl.load(factor_ptr + 6),
    )
    num_elements = tl.load(row_ptr + NUM_ELEMENTS)
    if RANDOM:
        seed = tl.load(tl.load(row_ptr + STEP).to(tl.pointer_type(tl.float32))).to(tl.int32)
        number = tl.load(row_ptr + NUMBER).to(tl.uint32)
        high = (start >> 32).to(tl.uint32)
    for tile in range(0, CONFIG.chunk, 2 * HALF_TILE):
        first = start + tile + tl.arange(0, HALF_TILE)
        random_bits = 0, 0, 0, 0
        if RANDOM:
            # Different bits for every element of every parameter in every step, the same in every run.
            low, zero = first.to(tl.uint32), (first * 0).to(tl.uint32)  # zero + n: n for every element.
            # Four numbers of 32 bits: for moments and weight of the first half of the tile, then of the second.
            random_bits = tl.philox(seed, low, zero + high, zero + number, zero, PHILOX_ROUNDS)
        for half in tl.static_range(2):
            offset = first + half * HALF_TILE
            mask = None if VECTORS else offset < num_elements
            moment_bits, weight_bits = random_bits[2 * half], random_bits[2 * half + 1]
            _update(addresses, factors, clip, offset, mask, moment_bits, weight_bits, VECTORS, CONFIG)


@triton.jit
def adamw_update_kernel(rows_ptr, chunks_ptr, factors_ptr, clip_ptr, first_chunk, CONFIG: tl.constexpr):
    """Update one chunk of one parameter in each program."""
    chunk_ptr = chunks_ptr + 2 * (first_chunk + tl.program_id(0))
    row = tl.load(chunk_ptr)
    start = tl.load(chunk_ptr + 1).to(tl.int64) * CONFIG.chunk
    row_ptr = rows_ptr + row * NUM_COLUMNS
    factor_ptr = factors_ptr + row * NUM_FACTORS
    clip = 1.0
    if CONFIG.clipped:
        clip = tl.load(clip_ptr + 1)  # Behind the norm.
    # Compiled twice: with 128-bit accesses for whole, aligned chunks, and with masks for the others.
    if (start + CONFIG.chunk <= tl.load(row_ptr + NUM_ELEMENTS)) & (tl.load(row_ptr + ALIGNED) == 1):
        _update_chunk(row_ptr, factor_ptr, clip, start, VECTORS=True, CONFIG=CONFIG)
    else:
        _update_chunk(row_ptr, factor_ptr, clip, start, VECTORS=False, CONFIG=CONFIG)


@triton.jit
def _sum_of_squares(
    gradient_address, start, num_elements, DTYPE: tl.constexpr, VECTORS: tl.constexpr, CHUNK: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Return the sum of a chunk's squares in float32."""
    sums = tl.zeros((TILE,), tl.float32)
    for tile in range(0, CHUNK, TILE):
        offset = start + tile + tl.arange(0, TILE)
        pointers = _pointers(gradient_address, offset, DTYPE, VECTORS)
        if VECTORS:
            gradient = tl.load(pointers)
        else:
            gradient = tl.load(pointers, mask=offset < num_elements, other=0.0)
        gradient = gradient.to(tl.float32)
        sums += gradient * gradient
    return tl.sum(sums, axis=0)


@triton.jit
def adamw_norm_kernel(
    rows_ptr, chunks_ptr, sums_ptr, first_chunk, GRADIENT_DTYPE: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr
):
    """Sum the squares of one chunk of one gradient in each program."""
    chunk = first_chunk + tl.program_id(0)
    start = tl.load(chunks_ptr + 2 * chunk + 1).to(tl.int64) * CHUNK
    row_ptr = rows_ptr + tl.load(chunks_ptr + 2 * chunk) * NUM_COLUMNS
    address = tl.load(row_ptr + GRADIENT)
    num_elements = tl.load(row_ptr + NUM_ELEMENTS)
    if (start + CHUNK <= num_elements) & (tl.load(row_ptr + ALIGNED) == 1):
        total = _sum_of_squares(address, start, num_elements, GRADIENT_DTYPE, VECTORS=True, CHUNK=CHUNK, TILE=TILE)
    else:
        total = _sum_of_squares(address, start, num_elements, GRADIENT_DTYPE, VECTORS=False, CHUNK=CHUNK, TILE=TILE)
    tl.store(sums_ptr + chunk, total)


@triton.jit
def adamw_prepare_kernel(
    rows_ptr, groups_ptr, factors_ptr, sums_ptr, clip_ptr, num_rows, num_sums, max_norm,
    CLIPPED: tl.constexpr, ROW_TILE: tl.constexpr, SUM_TILE: tl.constexpr,
):  # fmt: skip
    """Count the step of every parameter, and compute its factors and the factor of clipping, in one program.

    A group's settings are in the order of SETTINGS, factors in that of the comment at NUM_FACTORS.
    """
    if CLIPPED:
        sums = tl.zeros((SUM_TILE,), tl.float64)
        for start in range(0, num_sums, SUM_TILE):
            chunk = start + tl.arange(0, SUM_TILE)
            sums += tl.load(sums_ptr + chunk, mask=chunk < num_sums, other=0.0).to(tl.float64)
        norm = tl.sqrt(tl.sum(sums, axis=0)).to(tl.float32)
        clip = max_norm / (norm + 1e-6)  # As torch.nn.utils.clip_grad_norm_ adds it.
        tl.store(clip_ptr, norm)  # Behind it: the factor.
        # A norm of NaN makes all gradients NaN, as torch.nn.utils.clip_grad_norm_ does.
        tl.store(clip_ptr + 1, tl.where(clip > 1.0, 1.0, clip))
    for start in range(0, num_rows, ROW_TILE):
        row = start + tl.arange(0, ROW_TILE)
        mask = row < num_rows
        row_ptr = rows_ptr + row * NUM_COLUMNS
        step_ptr = tl.load(row_ptr + STEP, mask=mask, other=0).to(tl.pointer_type(tl.float32))
        step = tl.load(step_ptr, mask=mask, other=0.0) + 1.0
        tl.store(step_ptr, step, mask=mask)
        # Settings and steps are in float64: float32 would be off by 6e-5 of 1 - beta2^t in the first step.
        group_ptr = groups_ptr + tl.load(row_ptr + GROUP, mask=mask, other=0) * NUM_SETTINGS
        lr = tl.load(group_ptr)
        beta1 = tl.load(group_ptr + 1)
        beta2 = tl.load(group_ptr + 2)
        count = step.to(tl.float64)
        factor_ptr = factors_ptr + row * NUM_FACTORS
        tl.store(factor_ptr, 1.0 - lr * tl.load(group_ptr + 4), mask=mask)  # SETTINGS[4]: weight_decay.
        tl.store(factor_ptr + 1, lr / (1.0 - tl.exp(count * tl.log(beta1))), mask=mask)
        tl.store(factor_ptr + 2, 1.0 / tl.sqrt(1.0 - tl.exp(count * tl.log(beta2))), mask=mask)
        tl.store(factor_ptr + 3, tl.load(group_ptr + 3), mask=mask)  # SETTINGS[3]: eps.
        tl.store(factor_ptr + 4, 1.0 - beta1, mask=mask)
        tl.store(factor_ptr + 5, beta2, mask=mask)
        tl.store(factor_ptr + 6, 1.0 - beta2, mask=mask)


INTERPRETED = not isinstance(adamw_update_kernel, triton.JITFunction)

# Elements of a program. The interpreter takes as long for few as for many. On an H200, 16384, 8192, 4096 and 2048 for
# 0.94 B float32 parameters with float32 states reached 0.95, 0.97, 0.98 and 0.98 of the copy rate.
CHUNK = 65536 if INTERPRETED else 4096


def reference_adamw(
    parameter: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: int,
    *,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> tuple[Tensor, Tensor, Tensor]:
    """Take step number ``step`` (the first is 1) of one parameter in PyTorch: the ground truth of the tests.

    All tensors have one shape and dtype, any; returns the new parameter and moments.
    """
    beta1, beta2 = betas
    exp_avg = exp_avg.lerp(gradient, 1 - beta1)
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * gradient * gradient
    denominator = exp_avg_sq.sqrt() / math.sqrt(1 - beta2**step) + eps
    parameter = (1 - lr * weight_decay) * parameter - lr / (1 - beta1**step) * exp_avg / denominator
    return parameter, exp_avg, exp_avg_sq
