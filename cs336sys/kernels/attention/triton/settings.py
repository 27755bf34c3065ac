"""Tile sizes, warps and pipeline depth of the Triton attention kernels: a pure function of shape, dtype and GPU.

Nothing is tuned at run time, so the first call of a kernel compiles one variant, in seconds. Backward is *fused*, or it
is deterministic: *separate* (see backward.py), or *joint*, the separate passes in one launch.

Comments give measurements: H200, triton 3.6, bf16 (or fp32 by tf32x3), causal, medians in ms, first of what is chosen
for a shape, batch x heads x S x D, then of other tiles, queries x keys: "1x16x1024x64: 0.073, 64x64 0.092". "ptr" loads
by pointers, "tma" by descriptors, which take the CPU some microseconds. Where no number stands, none has been kept.
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from cs336sys.kernels.attention.problem import AMD, AttentionProblem, has_hopper_resources


@dataclass(frozen=True)
class TileSettings:
    """One launch: tiles of ``query_rows`` queries and ``key_rows`` keys.

    A program of forward or of the dQ pass owns a tile of queries and streams tiles of keys; one of the dK/dV pass owns
    keys and streams queries. ``max_registers`` limits the registers of a thread, for more programs on one
    multiprocessor.
    """

    query_rows: int
    key_rows: int
    num_warps: int
    num_stages: int
    use_tma: bool = False
    max_registers: int | None = None

    def __str__(self) -> str:
        text = f"{self.query_rows}x{self.key_rows}, {self.num_warps} warps, {self.num_stages} stages"
        return text + ", TMA" * self.use_tma + (f", {self.max_registers} registers" if self.max_registers else "")


@dataclass(frozen=True)
class ForwardSettings:
    """``num_splits``: programs that share the keys of one tile of queries; a second kernel combines what they find."""

    tile: TileSettings
    num_splits: int = 1

    def __str__(self) -> str:
        return str(self.tile)


@dataclass(frozen=True)
class BackwardPass:
    """One launch of the backward kernel, over tiles of keys for dK and dV, tiles of queries for dQ, or both at once."""

    tile: TileSettings
    computes_dkv: bool = False
    computes_dq: bool = False


@dataclass(frozen=True)
class BackwardSettings:
    """All passes of a backward.

    ``fused``: the only pass is over keys and adds up dQ as well, in no fixed order. ``num_splits``: how many programs
    share the queries of one tile of keys, and so add up dK and dV too; 1 unless fused.
    """

    passes: tuple[BackwardPass, ...]
    fused: bool = False
    num_splits: int = 1

    def __str__(self) -> str:
        form = "fused" if self.fused else "separate" if len(self.passes) > 1 else "joint"
        return "; ".join([form, *(str(backward_pass.tile) for backward_pass in self.passes)])


def fused(tile: TileSettings, num_splits: int = 1) -> BackwardSettings:
    """Return one pass over tiles of keys that computes dK, dV and dQ."""
    return BackwardSettings((BackwardPass(tile, computes_dkv=True),), fused=True, num_splits=num_splits)


def separate(key_value: TileSettings, query: TileSettings) -> BackwardSettings:
    """Return a pass over tiles of keys for dK and dV, then one over tiles of queries for dQ."""
    return BackwardSettings((BackwardPass(key_value, computes_dkv=True), BackwardPass(query, computes_dq=True)))


def joint(tile: TileSettings) -> BackwardSettings:
    """Return the two passes of the separate form side by side in one launch."""
    return BackwardSettings((BackwardPass(tile, computes_dkv=True, computes_dq=True),))


# The fewest keys that the forward kernel splits, and the most splits of several tiles of queries, and of one, where a
# split has so many keys at least.
MIN_SPLIT_KEYS = 1024
MAX_SPLITS = 8
MAX_SPLITS_OF_ONE_TILE, LEAST_OF_ONE_TILE = 32, 256

_INTERPRETER = TileSettings(query_rows=32, key_rows=16, num_warps=4, num_stages=1)

# Tiles where products read their operands from registers, of forward and of both passes of backward, up to a head
# dimension. Compiled and not measured: on 8.x and 12.0 a thread spills at most 64 bytes of its registers, but for fp32
# with the smallest tiles there are, and a program takes at most 99 KiB (docs/gpus.md).
_HALF_TILES = {
    64: (TileSettings(64, 64, num_warps=4, num_stages=3), TileSettings(32, 64, num_warps=4, num_stages=2)),
    128: (TileSettings(64, 64, num_warps=4, num_stages=2), TileSettings(32, 64, num_warps=8, num_stages=2)),
    256: (TileSettings(64, 32, num_warps=8, num_stages=2), TileSettings(32, 32, num_warps=8, num_stages=1)),
}
_FLOAT32_TILES = {
    32: (TileSettings(32, 64, num_warps=4, num_stages=2), TileSettings(32, 32, num_warps=4, num_stages=2)),
    64: (TileSettings(32, 64, num_warps=4, num_stages=2), TileSettings(32, 32, num_warps=4, num_stages=1)),
    128: (TileSettings(32, 32, num_warps=4, num_stages=2), TileSettings(16, 16, num_warps=4, num_stages=1)),
    256: (TileSettings(16, 16, num_warps=8, num_stages=1), TileSettings(16, 16, num_warps=8, num_stages=1)),
}
# NVIDIA's GPUs multiply fp32 itself without tensor cores.
_IEEE_TILES = {
    64: (TileSettings(32, 32, num_warps=4, num_stages=2), TileSettings(32, 32, num_warps=8, num_stages=1)),
    128: (TileSettings(32, 32, num_warps=8, num_stages=1), TileSettings(16, 32, num_warps=8, num_stages=1)),
    256: (TileSettings(16, 16, num_warps=8, num_stages=1), TileSettings(16, 16, num_warps=8, num_stages=1)),
}


def _is_beyond_hopper(problem: AttentionProblem) -> bool:
    return problem.capability is not None and problem.capability >= (10, 0)


def _holds_operands_in_registers(problem: AttentionProblem) -> bool:
    """Return whether products read their operands from registers: on 10.x and 11.0 those of fp32 alone."""
    return not has_hopper_resources(problem.capability) or (
        problem.dtype == torch.float32 and _is_beyond_hopper(problem)
    )


def _tiles_by_registers(problem: AttentionProblem) -> tuple[TileSettings, TileSettings]:
    """Return the tiles of forward and of all passes of backward where products read operands from registers."""
    tiles = _FLOAT32_TILES if problem.dtype == torch.float32 else _HALF_TILES
    if problem.float32_precision == "ieee" and problem.dtype == torch.float32 and problem.capability != AMD:
        tiles = _IEEE_TILES  # Without tensor cores, which on AMD's GPUs multiply fp32 itself.
    forward, backward = next(tiles[head_dim] for head_dim in tiles if problem.head_dim <= head_dim)
    if problem.capability == AMD:
        # Its warps have 64 threads, of which a program of four may use 512 registers each, and one of eight 256.
        return replace(forward, num_warps=4), replace(backward, num_warps=4)
    return forward, backward


@functools.cache
def forward_settings(problem: AttentionProblem) -> ForwardSettings:
    """Return the settings of the forward kernels."""
    tile = _forward_tile(problem)
    return ForwardSettings(tile, _num_splits(problem, tile))


def _num_splits(problem: AttentionProblem, tile: TileSettings) -> int:
    """Return the splits that leave a multiprocessor four programs, or one below 2048 keys.

    Forward with 1, 2, 4 and 8 splits: 1x1x4096x64 0.0441, 0.0295, 0.0221, 0.0200; 1x1x16384x128 0.2224, 0.1442, 0.1539,
    0.1792. With two splits, 1x16x1024x64 takes 0.0223, without 0.0200.

    Where no other tile reads a tile's keys, memory is the limit: one program, of head dimension 64 two. Full, a query a
    head, with 8, 16 and 32 splits: 1x8 over 32768x128 0.0620, 0.0501, 0.0545; 32x1 over 8192x64 0.0313, 0.0367, 0.0377;
    with 1, 2 and 4: 128x1 over 8192x128 0.1326, 0.1354, 0.1393; 64x1 over 8192x256 0.286, 0.166, 0.171. Few keys, with
    4, 8 and 16: 1x8 over 1024x128 0.0127, 0.0127, 0.0137; over 2048 0.0152, 0.0142, 0.0152; 2048x64 0.0134, 0.0121,
    0.0124; 1x2 over 2048x256 0.0272, 0.0206, 0.0193, with 32 0.0240.
    """
    # Not split: in the interpreter, which has no capability; of float32, which was not measured; and with few keys,
    # where the second launch costs the CPU more than the splits save the GPU.
    num_keys = problem.num_keys
    if problem.window is not None:  # The most keys that a tile of queries sees.
        num_keys = min(num_keys, problem.window + tile.query_rows - 1)
    if problem.capability is None or problem.dtype == torch.float32 or num_keys < MIN_SPLIT_KEYS:
        return 1
    num_programs = problem.num_sequences * -(-problem.num_queries // tile.query_rows)
    per_sm, max_splits = 4 if num_keys >= 2 * MIN_SPLIT_KEYS else 1, MAX_SPLITS
    if problem.num_queries <= tile.query_rows and problem.group_size == 1:
        per_sm = 1 if problem.head_dim > 64 else 2
        max_splits = min(MAX_SPLITS_OF_ONE_TILE, num_keys // LEAST_OF_ONE_TILE)
    splits = 1
    while 2 * splits <= max_splits and 2 * splits * num_programs <= per_sm * problem.num_multiprocessors:
        splits *= 2
    return splits


def _forward_tile(problem: AttentionProblem) -> TileSettings:
    if problem.capability is None:
        return _INTERPRETER
    if _holds_operands_in_registers(problem):
        return _forward_by_registers(problem)
    if problem.dtype == torch.float32:
        return _float32_forward(problem)
    tma = problem.tma_allowed
    if problem.head_dim > 128:
        if tma:
            return TileSettings(128, 64, num_warps=8, num_stages=2, use_tma=True)
        return TileSettings(64, 32, num_warps=4, num_stages=2)
    if problem.head_dim <= 32:
        # 1x1x65536x16: 0.904; by tma 0.969. 1x1x1024x16: 0.0135, where 16 to 64 rows are all alike.
        return TileSettings(64, 64, num_warps=4, num_stages=3)
    if not tma or (_is_launch_bound(problem) and problem.head_dim <= 64):
        # 1x1x512x64: 0.0116, by tma 0.0119; 1x16x512x64: 0.0124, 0.0127.
        return TileSettings(64, 64, num_warps=4, num_stages=3 if problem.head_dim <= 64 else 2)
    if _few_programs(problem, 128, per_sm=2):
        # 1x1x8192x64: 0.0794, by ptr 0.0867, 64x128 0.0955; 1x1x32768x128: 0.544, 128x64 0.990.
        return TileSettings(64, 64, num_warps=4, num_stages=3, use_tma=True)
    if problem.head_dim <= 64:
        if problem.num_keys <= 512:
            # 4x25x512x64: 0.0215, 64x128 0.0239.
            return TileSettings(64, 64, num_warps=4, num_stages=2, use_tma=True)
        # 1x16x16384x64: 1.287, 128x64 with 8 warps 1.342. 8x16x2048x64: 0.1965, 0.2060. 1x1x65536x64: 1.237, 1.432.
        return TileSettings(64, 128, num_warps=4, num_stages=2, use_tma=True)
    if problem.window is not None:
        # Three loops instead of two spill registers under the limit below.
        return TileSettings(64, 64, num_warps=4, num_stages=3, use_tma=True)
    # 128 registers let two programs share a multiprocessor. 1x16x16384x128: 2.042, without the limit 2.41, 128x128
    # 2.262. 8x16x2048x128: 0.3304, 64x64 0.3471.
    return TileSettings(128, 64, num_warps=8, num_stages=2, use_tma=True, max_registers=128)


def _forward_by_registers(problem: AttentionProblem) -> TileSettings:
    """Return the forward kernel's tile where products read their operands from registers."""
    tile, _ = _tiles_by_registers(problem)
    # Three loops over keys (a window) instead of two, or masks of columns (a head dimension that is padded to 128),
    # spill up to 88 bytes of a thread's registers on 12.0 with a whole tile.
    needs_masks = 64 < problem.head_dim <= 128 and (problem.window is not None or problem.head_dim < 128)
    if problem.dtype != torch.float32:
        return replace(tile, key_rows=32) if needs_masks else tile
    is_small = needs_masks or (problem.head_dim <= 128 and _few_programs(problem, 64))
    return replace(tile, query_rows=16) if is_small else tile  # Fewer rows also give more programs.


def _float32_forward(problem: AttentionProblem) -> TileSettings:
    if problem.head_dim > 128:
        return TileSettings(32, 16, num_warps=4, num_stages=1)
    if problem.float32_precision == "ieee":
        return TileSettings(32, 32, num_warps=4, num_stages=2)
    if problem.head_dim <= 32:
        # 1x1x1024x16: 0.0326, 64x64 0.0362. 1x1x8192x16: 0.2132, 64x64 0.2509.
        return TileSettings(32, 64, num_warps=4, num_stages=2)
    if _few_programs(problem, 64):
        # 1x1x8192x64: 0.3125, 32x64 0.3531, 64x64 0.5484. 1x1x1024x128: 0.0580, 32x32 0.1082.
        return TileSettings(16, 64, num_warps=4, num_stages=2)
    if problem.head_dim <= 64 and _few_programs(problem, 64, per_sm=2):
        # 1x16x1024x64: 0.073, 64x64 0.092.
        return TileSettings(32, 64, num_warps=4, num_stages=2)
    if problem.head_dim <= 64:
        # 1x1x65536x64: 11.45, 32x64 12.71, 16x64 17.63.
        return TileSettings(64, 64, num_warps=4, num_stages=2)
    # 1x1x16384x128: 1.843, 16x64 1.866, 64x32 with 8 warps 3.83.
    return TileSettings(32, 32, num_warps=4, num_stages=2)


@functools.cache
def backward_settings(problem: AttentionProblem, deterministic: bool) -> BackwardSettings:
    """Choose the form of the backward pass, joint, separate or (unless ``deterministic``) fused, and its tiles."""
    if problem.capability is None:
        return joint(_INTERPRETER) if deterministic else fused(_INTERPRETER)
    if _holds_operands_in_registers(problem):
        return _backward_with_register_operands(problem, deterministic)
    if problem.dtype == torch.float32:
        return _float32_backward(problem, deterministic)
    if problem.head_dim > 128:
        return _wide_backward(problem)
    pointer_tile = TileSettings(64, 64, num_warps=4, num_stages=2)
    if _is_launch_bound(problem):
        return _launch_bound_backward(problem)
    if problem.head_dim <= 32 and not deterministic:
        if not problem.tma_allowed:
            # By pointers, 1x1x8192x16: 0.0497.
            return _fused_with_splits(problem, pointer_tile, per_sm=4)
        # 1x1x8192x16: 0.046, without splits 0.118; 1x16x4096x32: 0.156, joint 0.174. With 32, 128 registers let four
        # programs share a multiprocessor.
        max_registers = 128 if problem.head_dim > 16 and not _is_beyond_hopper(problem) else None
        tile = TileSettings(64, 64, num_warps=4, num_stages=2, use_tma=True, max_registers=max_registers)
        return _fused_with_splits(problem, tile, per_sm=6)
    if not problem.tma_allowed:
        return joint(pointer_tile)
    if _few_programs(problem, 128, per_sm=2):
        # 1x1x8192x64: 0.134, with two stages 0.257, separate 0.196; 1x1x8192x128: 0.149, 0.198, 0.249.
        return joint(TileSettings(64, 64, num_warps=4, num_stages=3, use_tma=True))
    if problem.head_dim <= 64:
        if problem.num_queries <= 512:
            # 4x25x512x64: 0.0853, fused 0.0864, by tma 0.1219.
            return joint(pointer_tile)
        # 1x16x16384x64: 1.933 + 1.203, fused 3.344; 128x64 for dK, dV 2.607, 128x128 2.438; 64x64 for dQ 1.363.
        # 8x16x2048x64: 0.517, joint 0.572.
        key_value = TileSettings(64, 64, num_warps=4, num_stages=2, use_tma=True)
        return separate(key_value, TileSettings(128, 64, num_warps=8, num_stages=3, use_tma=True))
    # dQ, 1x16x16384x128: 2.555, 128x64 3.14 to 3.25, 64x64 2.783.
    query = TileSettings(128, 32, num_warps=8, num_stages=3, use_tma=True)
    if problem.group_size > 1 and problem.window is not None:
        # With 64 queries registers spill, and beyond 9.0 with four warps.
        num_warps = 8 if _is_beyond_hopper(problem) else 4
        return separate(TileSettings(32, 64, num_warps=num_warps, num_stages=2, use_tma=True), query)
    if problem.num_queries <= 4096 or problem.group_size > 1:
        # dK, dV, 8x16x2048x128: 0.513, 128x64 0.554.
        return separate(TileSettings(64, 64, num_warps=4, num_stages=2, use_tma=True), query)
    # dK, dV, 1x16x16384x128: 3.489, with two stages 3.88, 64x64 3.732; fused 7.511 for all three.
    return separate(TileSettings(64, 128, num_warps=8, num_stages=3, use_tma=True), query)


def _launch_bound_backward(problem: AttentionProblem) -> BackwardSettings:
    if problem.head_dim > 64 and (problem.window is not None or problem.group_size > 1):
        # With 64 keys it would spill registers.
        return joint(TileSettings(32, 32, num_warps=4, num_stages=1))
    if problem.head_dim <= 32 or not problem.tma_allowed:
        # 1x12x512x32: 0.0162, by tma 0.0171, three stages 0.0156; 1x12x512x16: 0.0129, 0.0159, 0.0139.
        return joint(TileSettings(64, 64, num_warps=4, num_stages=2))
    # Three stages, two: 1x16x1024x64: 0.0327, 0.0352; 1x12x512x128: 0.0233, 0.0255; but 1x16x1024x128: 0.0586, 0.0465.
    num_stages = 2 if problem.head_dim > 64 and not _few_programs(problem, 64) else 3
    return joint(TileSettings(64, 64, num_warps=4, num_stages=num_stages, use_tma=True))


def _backward_with_register_operands(problem: AttentionProblem, deterministic: bool) -> BackwardSettings:
    """Choose for GPUs that read operands of products from registers: 8.x, 12.x, AMD's; float32 also 10.x and 11.0."""
    _, tile = _tiles_by_registers(problem)
    if problem.head_dim > 128:
        return joint(tile)  # Here and at the end compiled, but not measured.
    if problem.dtype == torch.float32:
        # On an H200, with the A100's tiles: 1x16x4096x64 2.309, joint 3.165; x128 8.560, 12.784; by ieee 22.41, 42.55.
        # Fused, head dimensions padded to 128, whose columns are masked, spill 332 bytes on 8.9. AMD's: compiled joint.
        spills_if_fused = 64 < problem.head_dim < 128
        is_joint = deterministic or spills_if_fused or problem.capability == AMD
        return joint(tile) if is_joint else _fused_with_splits(problem, tile, per_sm=4)
    # As on an H200 by pointers, see backward_settings().
    if problem.head_dim <= 32 and not deterministic and not _is_launch_bound(problem):
        return _fused_with_splits(problem, TileSettings(64, 64, num_warps=4, num_stages=2), per_sm=4)
    return joint(tile)


def _wide_backward(problem: AttentionProblem) -> BackwardSettings:
    """Choose the passes for head dimensions above 128, where products read their operands from shared memory."""
    # On 10.x, where other instructions multiply, these tiles need 257 and 240 KiB: more than there is.
    if problem.tma_allowed and not _is_beyond_hopper(problem):
        # dK, dV, 1x16x16384x256: 13.88, by ptr 15.66, 32x64 19.05, with four stages 17.80.
        key_value = TileSettings(64, 64, num_warps=8, num_stages=2, use_tma=True)
        if problem.window is not None or problem.group_size > 1:
            # The tiles above would spill 416 bytes of a thread's registers.
            key_value = TileSettings(32, 64, num_warps=8, num_stages=2, use_tma=True)
        # dQ: 5.53, with two stages 6.93, 64x32 with 4 warps 6.43, 128x64 by ptr 6.36. Together with D: 19.85.
        return separate(key_value, TileSettings(128, 32, num_warps=8, num_stages=3, use_tma=True))
    return joint(TileSettings(32, 32, num_warps=4, num_stages=1))  # By pointers; on 10.x these fit, too.


def _float32_backward(problem: AttentionProblem, deterministic: bool) -> BackwardSettings:
    if problem.head_dim > 128:
        return joint(TileSettings(16, 16, num_warps=4, num_stages=1))
    if deterministic or problem.float32_precision == "ieee":
        # 1x1x1024x64: 0.0841, separate 0.1379. 1x1x8192x64: 0.837, 1.312. 1x1x8192x128: 1.752, 32x16 3.287.
        return joint(TileSettings(32, 32, num_warps=4, num_stages=1))
    if problem.head_dim <= 16:
        return _fused_with_splits(problem, TileSettings(32, 64, num_warps=4, num_stages=1), per_sm=4)
    if problem.head_dim <= 32:
        # 1x1x1024x32: 0.030, 32x32 without splits 0.105. 1x1x8192x32: 0.344, 0.883. 1x16x4096x32: 1.311, 2.113.
        return _fused_with_splits(problem, TileSettings(32, 64, num_warps=4, num_stages=2), per_sm=8)
    if problem.head_dim <= 64:
        if _few_programs(problem, 64, per_sm=4):
            # 1x1x1024x64: 0.0352, joint 0.0840. 1x1x4096x64: 0.171, 0.414. 1x1x16384x64: 2.179, 3.070.
            return _fused_with_splits(problem, TileSettings(32, 32, num_warps=4, num_stages=1), per_sm=4)
        # 1x16x4096x64: 2.148, 32x32 2.309, joint 3.165.
        return fused(TileSettings(32, 64, num_warps=4, num_stages=1))
    # 1x1x1024x128: 0.055, without splits 0.139; 1x1x16384x128: 5.354, joint 6.252.
    return _fused_with_splits(problem, TileSettings(32, 16, num_warps=4, num_stages=1), per_sm=3)


def _fused_with_splits(problem: AttentionProblem, tile: TileSettings, per_sm: int) -> BackwardSettings:
    """Return the fused form, with splits for ``per_sm`` programs on every multiprocessor, as far as there are tiles."""
    key_tiles = problem.num_key_sequences * -(-problem.num_keys // tile.key_rows)
    queries_of_key_tile = min(problem.num_queries, tile.key_rows + (problem.window or problem.num_queries))
    query_tiles = -(-queries_of_key_tile // tile.query_rows)
    return fused(tile, min(query_tiles, -(-per_sm * problem.num_multiprocessors // key_tiles)))


def _few_programs(problem: AttentionProblem, rows: int, per_sm: int = 1) -> bool:
    """Return whether tiles of this many rows give the multiprocessors fewer than ``per_sm`` programs on average."""
    return problem.num_sequences * -(-problem.num_queries // rows) < per_sm * problem.num_multiprocessors


def _is_launch_bound(problem: AttentionProblem) -> bool:
    """Return whether the CPU takes longer to launch the kernels than the GPU to run them."""
    return _few_programs(problem, 128) and max(problem.num_queries, problem.num_keys) <= 1024


# The most settings that are tried for a pass, the built-in ones among them.
MAX_CANDIDATES = 6


def problem_class(problem: AttentionProblem) -> AttentionProblem:
    """Return the largest of the problems that share a measurement: their sizes round up to the same powers of two."""
    names = "num_sequences", "num_queries", "num_keys", "window"
    sizes = {name: 1 << (size - 1).bit_length() for name in names if (size := getattr(problem, name))}
    if problem.diagonal > 0:  # Of queries at the end of the keys: it grows with each decoded token.
        sizes["diagonal"] = max(1, sizes["num_keys"] - sizes["num_queries"])
    return replace(problem, **sizes)


def candidates(settings_of: Callable[[AttentionProblem], Any], problem: AttentionProblem) -> dict[str, Any]:
    """Return the settings to try for a problem's class, by their texts: built-in, H200's and A100's, and neighbours.

    ``settings_of``: returns the built-in ones of a problem.
    """
    representative = problem_class(problem)  # The class's largest problem.
    built_in = settings_of(representative)
    # 8 warps instead of 4 or 4 instead of 8, more queries, the other way to load, more and fewer stages; the first two
    # without the limits of registers, which were measured for other warps and rows.
    changes: tuple[Callable[[TileSettings], TileSettings], ...] = (
        lambda tile: replace(tile, num_warps=12 - tile.num_warps, max_registers=None),
        lambda tile: replace(tile, query_rows=min(128, 2 * tile.query_rows), num_warps=8, max_registers=None),
        lambda tile: replace(tile, use_tma=problem.tma_allowed and not tile.use_tma),
        lambda tile: replace(tile, num_stages=tile.num_stages + 1),
        lambda tile: replace(tile, num_stages=max(1, tile.num_stages - 1)),
    )
    other_gpus = [settings_of(replace(representative, capability=capability)) for capability in ((9, 0), (8, 0))]
    by_text: dict[str, Any] = {}
    for settings in (built_in, *other_gpus, *(_with_tiles(built_in, change) for change in changes)):
        by_text.setdefault(str(settings), settings)
    return dict(itertools.islice(by_text.items(), MAX_CANDIDATES))


def _with_tiles(settings: Any, change: Callable[[TileSettings], TileSettings]) -> Any:
    if isinstance(settings, ForwardSettings):
        return replace(settings, tile=change(settings.tile))
    return replace(settings, passes=tuple(replace(part, tile=change(part.tile)) for part in settings.passes))
