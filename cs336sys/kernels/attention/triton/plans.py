"""Plans of launches: how the Triton attention kernels are given their grids, strides, tiles and descriptors."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton

from cs336sys.kernels.attention.plan import (
    BACKWARD_L2_BYTES,
    BACKWARD_TENSORS,
    FORWARD_L2_BYTES,
    FORWARD_TENSORS,
    GRADIENTS,
    Descriptors,
    Launch,
    Plan,
    Scratch,
    sequences_per_group,
)
from cs336sys.kernels.attention.problem import AttentionProblem, Operand, has_hopper_resources
from cs336sys.kernels.attention.triton import backward
from cs336sys.kernels.attention.triton.forward import (
    CombineConfig,
    ForwardConfig,
    ForwardStrides,
    combine_kernel,
    forward_kernel,
)
from cs336sys.kernels.attention.triton.kept_settings import kept_settings
from cs336sys.kernels.attention.triton.settings import BackwardPass, TileSettings, backward_settings, forward_settings

# A program of the two elementwise backward kernels takes this many elements, 32 in each of its 128 threads.
ELEMENTWISE_TILE = 4096

COMBINED_ROWS = 16  # The rows of a program that combines splits of the keys; 1x1x2048 gives 128 programs.


def _block_dim(problem: AttentionProblem) -> int:
    """Return the head dimension of tiles: a power of two, and at least the 16 that ``tl.dot`` needs."""
    return max(16, triton.next_power_of_2(problem.head_dim))


def _tile_constants(problem: AttentionProblem, tile: TileSettings) -> dict[str, Any]:
    """Return the constants of a kernel by the names of :class:`TileConfig`."""
    return {
        "head_dim": problem.head_dim,
        "block_dim": _block_dim(problem),
        "query_rows": tile.query_rows,
        "key_rows": tile.key_rows,
        "causal": problem.is_causal,
        "windowed": problem.window is not None,
        "shifted": problem.diagonal != 0,
        # To products of other dtypes it means nothing: one value of it compiles one variant of a kernel.
        "precision": problem.float32_precision if problem.dtype == torch.float32 else "ieee",
        "tma": tile.use_tma,
    }


def _descriptors(operand: Operand, rows: int, block_dim: int) -> Descriptors:
    return Descriptors(operand.shape, operand.strides, [1, 1, rows, block_dim])


def _launch_options(tile: TileSettings) -> dict:
    """Return a launch's options; triton 3.9 warns without ``enable_fp_fusion``, whose default is to change in 3.10."""
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "enable_fp_fusion": True}
    if tile.max_registers is not None:
        options["maxnreg"] = tile.max_registers
    return options


class ForwardPlan(Plan):
    """The launches of the forward kernels: one, and if programs share keys a second that combines what they find."""

    tensor_names = FORWARD_TENSORS

    def __init__(self, problem: AttentionProblem, operands: Sequence[Operand], device: torch.device):
        """``operands``: query, key, value and output."""
        super().__init__(device)
        settings = kept_settings("forward", problem, device) or forward_settings(problem)
        tile, num_splits = settings.tile, settings.num_splits
        block_dim = _block_dim(problem)
        query, _, _, out = operands
        num_heads, out_strides = query.num_heads, out.row_strides
        results = "out", "logsumexp"
        if num_splits > 1:
            num_rows = problem.num_sequences * problem.num_queries
            partial_strides = num_rows * problem.head_dim, problem.num_queries * problem.head_dim, problem.head_dim
            combine = Launch(
                combine_kernel,
                problem.num_sequences * triton.cdiv(problem.num_queries, COMBINED_ROWS),
                numbers=(partial_strides, out_strides, num_heads, problem.num_sequences, problem.num_queries),
                constants=(CombineConfig(problem.head_dim, block_dim, rows=COMBINED_ROWS, num_splits=num_splits),),
            )
            # The forward kernel writes outputs of (split, sequence, row), and behind them a logsumexp for each row.
            out_strides = partial_strides
            partial = self._add_tensor("partial", Scratch((num_splits * num_rows, problem.head_dim + 1)))
            results = partial, partial
        descriptors = []
        if tile.use_tma:
            rows = tile.query_rows, tile.key_rows, tile.key_rows
            tensors = zip(operands[:3], rows, strict=True)
            descriptors = [_descriptors(operand, tile_rows, block_dim) for operand, tile_rows in tensors]
        # The heads of a group stream the same keys.
        streamed_bytes = 2 * problem.num_keys * problem.head_dim * problem.dtype.itemsize // problem.group_size
        per_group = sequences_per_group(problem.num_sequences, streamed_bytes, FORWARD_L2_BYTES)
        strides = ForwardStrides._make([*(operand.row_strides for operand in operands[:3]), out_strides])
        sizes = problem.num_sequences, problem.num_queries, problem.num_keys, problem.window or 0, problem.diagonal
        launch = Launch(
            forward_kernel,
            num_splits * problem.num_sequences * triton.cdiv(problem.num_queries, tile.query_rows),
            numbers=(strides, num_heads, problem.group_size, *sizes, per_group, math.log2(math.e) * problem.scale),
            constants=(ForwardConfig(**_tile_constants(problem, tile), num_splits=num_splits),),
            descriptors=descriptors,
            **_launch_options(tile),
        )
        self._add_launch(launch, "query", "key", "value", *results)
        if num_splits > 1:
            self._add_launch(combine, partial, "out", "logsumexp")


class BackwardPlan(Plan):
    """The launches of the backward kernels: prepare, one or two passes, and in the fused form convert."""

    tensor_names = BACKWARD_TENSORS
    _read_by_pass = "query", "key", "value", "grad_out"
    # Whether programs add their shares of dQ one after the other, counting their turns.
    _takes_turns = False
    # Whether the pass is launched while the kernel that prepares it ends, by programmatic dependent launch. Short ones,
    # 1x16x1024x64: 0.0327 ms, one behind the other 0.0345; 1x12x512x32: 0.0162, 0.0172.
    _early = True
    # Whether it may begin as soon as a multiprocessor has room, and not only when all programs of that kernel end. Here
    # multiprocessors with room for several would take them all, where there are few, and leave others none
    # (1x16x1024x64: 0.0366).
    _at_once = False

    def __init__(
        self,
        problem: AttentionProblem,
        operands: Sequence[Operand],
        out: Operand | None,
        grads: Sequence[Operand],
        device: torch.device,
        deterministic: bool,
    ):
        """``operands``: query, key, value and the output's gradient; ``grads``: those of query, key and value.

        ``out``: none if the plan is called with D = rowsum(dO * O) in its place, (..., S_q) in float32.
        """
        super().__init__(device)
        self._problem = problem
        self._operands = operands
        query, key, _, grad_out = operands
        self._num_heads, self._num_key_heads = query.num_heads, key.num_heads
        self._grad_out_strides = grad_out.row_strides
        self._delta_given = out is None
        self._out_strides = (0, 0, 0) if out is None else out.row_strides
        self._grad_operands = grads
        self._grad_strides = [operand.row_strides for operand in grads]
        self._block_dim = _block_dim(problem)
        self._add_launches(deterministic)

    def _add_launches(self, deterministic: bool) -> None:
        # Kept settings may add gradients up in any order.
        kept = None if deterministic else kept_settings("backward", self._problem, self._device)
        settings = kept or backward_settings(self._problem, deterministic)
        self.fused, self._num_splits = settings.fused, settings.num_splits
        self._early = has_hopper_resources(self._problem.capability)
        passes = settings.passes
        # The first pass is that of dK and dV.
        self._pad(max(backward_pass.tile.query_rows for backward_pass in passes), passes[0].tile.key_rows)
        # A second pass is launched when the first has ended.
        launches = [self._pass_launch(passes[0], early=self._early)]
        launches += [self._pass_launch(backward_pass, early=False) for backward_pass in passes[1:]]
        self._add_prepared(launches)

    def _pad(self, query_rows: int, key_rows: int) -> None:
        """Count the rows of a sequence in scratch memory, where tiles are whole."""
        self._padded_queries = triton.cdiv(self._problem.num_queries, query_rows) * query_rows
        self._padded_keys = triton.cdiv(self._problem.num_keys, key_rows) * key_rows

    def _add_prepared(self, passes: Sequence[Launch]) -> None:
        """Add the passes between the launch that prepares them and, in the fused form, the one that converts sums."""
        problem = self._problem
        rows = max(16, min(128, ELEMENTWISE_TILE // self._block_dim))  # Of a program that prepares or converts.
        # Programs that share a tile of keys add dK and dV up in float32, as all programs of the fused form add up dQ.
        key_sums = self._num_splits > 1
        summed_keys = self._padded_keys if key_sums else 0
        num_tiles = triton.cdiv(max(self._padded_queries, summed_keys), rows)
        strides = self._out_strides, self._grad_out_strides
        sizes = problem.group_size, problem.num_queries, self._padded_queries, self._padded_keys
        tile = problem.head_dim, self._block_dim, rows
        sums_to_clear = {"fused": self.fused, "key_sums": key_sums, "turns": self._takes_turns}
        launching = {"early": self._early, "at_once": self._at_once}
        prepare = Launch(
            backward.prepare_kernel,
            problem.num_sequences * num_tiles,
            numbers=(*strides, num_tiles, self._num_heads, *sizes),
            constants=(backward.PrepareConfig(*tile, has_delta=self._delta_given, **(sums_to_clear | launching)),),
        )
        statistics = self._add_tensor("statistics", Scratch((2 * problem.num_sequences, self._padded_queries)))
        # The statistics stand in for sums that the form does not touch.
        grad_query_sum = grad_key_sum = grad_value_sum = statistics
        results: Sequence[str] = GRADIENTS
        if self.fused:
            num_rows = problem.num_sequences * self._padded_queries
            grad_query_sum = self._add_tensor("grad_query_sum", Scratch((num_rows, self._block_dim)))
        if key_sums:
            key_sum = Scratch((problem.num_key_sequences * self._padded_keys, self._block_dim))
            grad_key_sum = self._add_tensor("grad_key_sum", key_sum)
            grad_value_sum = self._add_tensor("grad_value_sum", key_sum)
            results = "grad_query", grad_key_sum, grad_value_sum
        turns = statistics
        if self._takes_turns:
            turns = self._add_tensor("turns", Scratch((problem.num_sequences, self._padded_queries)))
        sums = grad_query_sum, grad_key_sum, grad_value_sum
        self._add_launch(prepare, "out", "grad_out", "logsumexp", statistics, *sums, turns)
        for launch in passes:
            self._add_launch(launch, *self._tensors_of_pass(statistics, grad_query_sum, results))
        if self.fused:
            self._add_convert(sums, rows, key_sums)

    def _add_convert(self, sums: Sequence[str], rows: int, key_sums: bool) -> None:
        """Add the launch that makes gradients of the sums of dQ, dK and dV, with ``rows`` a program."""
        problem = self._problem
        num_tiles = triton.cdiv(max(self._padded_queries, self._padded_keys if key_sums else 0), rows)
        sizes = problem.group_size, problem.num_queries, problem.num_keys, self._padded_queries, self._padded_keys
        convert = Launch(
            backward.convert_grad_query_kernel,
            problem.num_sequences * num_tiles,
            numbers=(*self._grad_strides, num_tiles, self._num_heads, *sizes, problem.scale),
            constants=(backward.ConvertConfig(problem.head_dim, self._block_dim, rows, key_sums),),
        )
        self._add_launch(convert, *sums, *GRADIENTS)

    def _pass_launch(self, backward_pass: BackwardPass, early: bool) -> Launch:
        """Return the launch of a pass, which with ``early`` begins while the kernel before it ends."""
        problem, tile = self._problem, backward_pass.tile
        element_bytes = problem.dtype.itemsize
        if backward_pass.computes_dkv:
            # Of each query itself, its gradient of the output and, if fused, a row of the float32 sum of dQ.
            row_bytes = problem.head_dim * 2 * element_bytes + (4 * self._block_dim if self.fused else 0)
            # A program of dK and dV reads the queries of all group_size sequences that share its keys.
            streamed_bytes, l2_bytes = problem.num_queries * row_bytes * problem.group_size, BACKWARD_L2_BYTES
        else:
            key_bytes = 2 * problem.num_keys * problem.head_dim * element_bytes
            streamed_bytes, l2_bytes = key_bytes // problem.group_size, FORWARD_L2_BYTES  # A group shares its keys.
        key_tiles = triton.cdiv(problem.num_keys, tile.key_rows)
        key_programs = problem.num_key_sequences * key_tiles * self._num_splits if backward_pass.computes_dkv else 0
        query_tiles = triton.cdiv(problem.num_queries, tile.query_rows)
        query_programs = problem.num_sequences * query_tiles if backward_pass.computes_dq else 0
        return Launch(
            backward.backward_kernel,
            key_programs + query_programs,
            numbers=(
                backward.BackwardStrides._make(
                    [*(operand.row_strides for operand in self._operands), *self._grad_strides]
                ),
                *backward.Numbers(
                    num_heads=self._num_heads,
                    group_size=problem.group_size,
                    num_sequences=problem.num_sequences,
                    num_queries=problem.num_queries,
                    padded_queries=self._padded_queries,
                    num_keys=problem.num_keys,
                    window=problem.window or 0,
                    diagonal=problem.diagonal,
                    # Of queries; dK and dV take as many sequences of keys. If these are fewer, groups are less even in
                    # size, but none exceeds what fits into L2. If one launch computes all, dQ has the groups of dK, dV.
                    sequences_per_group=sequences_per_group(problem.num_sequences, streamed_bytes, l2_bytes),
                    key_programs=key_programs,
                    num_splits=self._num_splits,
                    scale=problem.scale,
                    scale_log2=problem.scale * math.log2(math.e),
                ),
            ),
            constants=(
                backward.BackwardConfig(
                    **_tile_constants(problem, tile),
                    grouped=problem.group_size > 1,
                    key_pass=backward_pass.computes_dkv,
                    query_pass=backward_pass.computes_dq,
                    fused=self.fused,
                    key_sums=self._num_splits > 1,
                    early=early,
                ),
            ),
            descriptors=self._pass_descriptors(tile),
            **_launch_options(tile),
            **({"launch_pdl": True} if early else {}),  # An option of NVIDIA's compiler alone.
        )

    def _tensors_of_pass(self, statistics: str, grad_query_sum: str, grads: Sequence[str]) -> Sequence[str]:
        """Return a pass's arguments; ``grads``: what it writes the gradients of query, key and value to."""
        return *self._read_by_pass, statistics, grad_query_sum, *grads

    def _pass_descriptors(self, tile: TileSettings) -> list[Descriptors]:
        """Return a pass's inputs as descriptors: query, key, value, output gradient, statistics, sum of dQ if fused."""
        if not tile.use_tma:
            return []
        rows = tile.query_rows, tile.key_rows, tile.key_rows, tile.query_rows
        tensors = zip(self._operands, rows, strict=True)
        descriptors = [_descriptors(operand, tile_rows, self._block_dim) for operand, tile_rows in tensors]
        padded_queries = self._padded_queries
        statistics = (2 * self._problem.num_sequences, padded_queries)
        descriptors.append(Descriptors(statistics, (padded_queries, 1), [1, tile.query_rows]))
        if self.fused:
            sums = (self._problem.num_sequences * padded_queries, self._block_dim)
            descriptors.append(Descriptors(sums, (self._block_dim, 1), [tile.query_rows, self._block_dim]))
        return descriptors
