"""Adds up what each program of a kernel has summed: without atomics, so that the order is always the same."""

import torch
import triton
import triton.language as tl

# A program adds up 8 columns, the 32 bytes of a sector, of so many rows at once: there are few, and what takes time is
# to wait for one load after another. 528 x 768 took 2.3 us on an H200, and 3.8 with 32 columns of 128 rows at a time.
ROW_TILES = 256, 1024
COLUMN_TILE = 8
NUM_WARPS = 8


@triton.jit
def _partial_sums_kernel(partials_ptr, sum_ptr, num_partials, width, ROW_TILE: tl.constexpr, COLUMN_TILE: tl.constexpr):
    column = tl.program_id(0) * COLUMN_TILE + tl.arange(0, COLUMN_TILE)[None, :]
    total = tl.zeros((ROW_TILE, COLUMN_TILE), dtype=tl.float32)
    for start in range(0, num_partials, ROW_TILE):
        row = (start + tl.arange(0, ROW_TILE)).to(tl.int64)[:, None]
        mask = (row < num_partials) & (column < width)
        total += tl.load(partials_ptr + row * width + column, mask=mask, other=0.0)
    tl.store(sum_ptr + column, tl.sum(total, axis=0, keep_dims=True), mask=column < width)


def sum_of_partials(partials: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Sums over the first dimension: (P, D) in float32, contiguous -> (D,), added in float32 and rounded to ``dtype``.

    ``torch.sum`` takes 10 microseconds on an H200 for 132 x 4096 and 27 for 660 x 768: with few rows, most of the time.
    """
    num_partials, width = partials.shape
    total = torch.empty(width, dtype=dtype, device=partials.device)
    with torch.cuda.device_of(partials):
        _partial_sums_kernel[(triton.cdiv(width, COLUMN_TILE),)](
            partials,
            total,
            num_partials,
            width,
            ROW_TILE=ROW_TILES[num_partials > ROW_TILES[0]],
            COLUMN_TILE=COLUMN_TILE,
            num_warps=NUM_WARPS,
        )
    return total
