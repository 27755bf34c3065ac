"""From tensors to launches of the Hopper kernels, in the way of triton/plans.py; schedule.py explains the terms."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from cs336sys.kernels.attention.hopper import schedule
from cs336sys.kernels.attention.hopper.backward import backward_kernel
from cs336sys.kernels.attention.hopper.backward_reducer import reducer_backward_kernel
from cs336sys.kernels.attention.hopper.backward_tiles import HopperBackwardConfig
from cs336sys.kernels.attention.hopper.backward_wide import wide_backward_kernel
from cs336sys.kernels.attention.hopper.convert import convert_register_order_kernel, sum_pieces_kernel
from cs336sys.kernels.attention.hopper.forward import HopperForwardConfig, forward_kernel
from cs336sys.kernels.attention.hopper.gluon import CAUSAL, WINDOW
from cs336sys.kernels.attention.hopper.settings import hopper_backward_settings, hopper_forward_settings
from cs336sys.kernels.attention.plan import (
    BACKWARD_L2_BYTES,
    FORWARD_L2_BYTES,
    FORWARD_TENSORS,
    Descriptors,
    Launch,
    Plan,
    Scratch,
    sequences_per_group,
)
from cs336sys.kernels.attention.problem import AttentionProblem, Operand
from cs336sys.kernels.attention.triton.plans import BackwardPlan

WARPGROUP_ROWS = 64  # The rows of one warpgroup's tile, in both kernels.
BACKWARD_QUERY_ROWS = 64  # A program of the backward kernel streams tiles of these many queries.

# Of the multiprocessors, each of which runs one program: how many programs that add to dQ in turn may begin before one
# that they wait for. If other kernels kept more than the rest to themselves, it would never begin.
BEGUN_TOGETHER = 0.75

# What a piece of an item takes besides its tiles of queries, in tiles: its keys and values, and dK and dV to be summed.
PIECE_COST = 5
# What an item that stays whole takes besides them: the same but for float32 sums, which are written and read.
WHOLE_COST = 2

# How many columns of dK and dV a program sums over the pieces, and how many pieces at a time; of grouped queries there
# may be few items of many pieces.
SUMMED_OF_ONE_HEAD = (128, 1)
SUMMED_OF_GROUP = (16, 8)

_BACKWARD_KERNELS = {"exchange": backward_kernel, "reducer": reducer_backward_kernel, "wide": wide_backward_kernel}

_GLUON_DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}

# The four warps of the first consumer; those of the other partitions come on top.
_OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": True}
# Launched while the kernel before it ends (programmatic dependent launch), and waits for what that wrote. Backward:
# 4x25x512x64 0.0482 ms, one behind the other 0.0515; 8x16x2048x64 0.416, 0.422; 4x25x512x128 0.0881, 0.0932.
_BACKWARD_OPTIONS = {**_OPTIONS, "launch_pdl": True}


class GluonDescriptors(Descriptors):
    """TMA descriptors that also know how their tile lies in shared memory, where the tensor cores read it.

    A tile is swizzled by the bytes of its rows, at most 128; single rows and, if not ``swizzled``, all lie as they are.
    """

    descriptor_class = TensorDescriptor

    def __init__(
        self,
        shape: Sequence[int],
        strides: Sequence[int],
        block_shape: list[int],
        dtype: torch.dtype,
        swizzled: bool = True,
    ):
        super().__init__(shape, strides, block_shape)
        layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=8 * dtype.itemsize, rank=len(block_shape))
        if swizzled:
            layout = gl.NVMMASharedLayout.get_default_for(block_shape, _GLUON_DTYPES[dtype])
        self._layout = (*self._layout, layout)


def _tile_descriptors(operand: Operand, rows: int, dtype: torch.dtype) -> GluonDescriptors:
    return GluonDescriptors(operand.shape, operand.strides, [1, 1, rows, operand.shape[3]], dtype)


def _mask(problem: AttentionProblem) -> int:
    """Return what hides keys from a query, as the kernels' ``MASK``."""
    return int(problem.is_causal) if problem.window is None else WINDOW.value


class HopperForwardPlan(Plan):
    """The launch of the forward kernel."""

    tensor_names = FORWARD_TENSORS

    def __init__(self, problem: AttentionProblem, operands: Sequence[Operand], device: torch.device):
        """``operands``: query, key, value and output."""
        super().__init__(device)
        settings = hopper_forward_settings(problem)
        rows = WARPGROUP_ROWS, settings.key_rows, settings.key_rows, WARPGROUP_ROWS
        item_rows, diagonal = settings.item_rows, problem.diagonal
        lengths = operands[0].num_heads, problem.num_queries, problem.num_keys
        # Of the items of a sequence, in tiles of keys: those that its queries see, and one for all else.
        costs, end_position = [], diagonal + problem.num_queries
        for position in range(diagonal, end_position, item_rows):
            tile = position, item_rows, end_position
            first = 0
            _, end = schedule.key_tiles(*tile, problem.num_keys, settings.key_rows, problem.is_causal)
            if problem.window is not None:
                first, _ = schedule.window_tiles(*tile, settings.key_rows, problem.window, end)
            costs.append(1 + end - first)
        # In full attention one sequence after another: then nearly all programs read the same keys at the same time.
        # 1x16x16384x128: 3.001 ms, in groups that fill L2 3.063; 1x16x16384x64: 1.854, 1.885.
        per_group = 1
        if problem.is_causal:
            # The heads that share keys stay together: their keys are in L2 once.
            streamed_bytes = 2 * problem.num_keys * problem.head_dim * problem.dtype.itemsize
            per_group = sequences_per_group(problem.num_key_sequences, streamed_bytes, FORWARD_L2_BYTES)
            per_group *= problem.group_size
        items = schedule.ordered_items(len(costs), problem.num_sequences, per_group, last_tile_first=problem.is_causal)
        num_programs = min(len(costs) * problem.num_sequences, problem.num_multiprocessors)
        table = schedule.as_table(schedule.share_out(items, costs, num_programs))
        self._add_tensor("schedule", torch.tensor(table, dtype=torch.int32, device=device))
        launch = Launch(
            forward_kernel,
            num_programs,
            (*lengths, math.log2(math.e) * problem.scale, problem.group_size, problem.window or 0, diagonal),
            constants=(
                HopperForwardConfig(
                    head_dim=problem.head_dim,
                    consumers=settings.consumers,
                    key_rows=settings.key_rows,
                    stages=settings.num_stages,
                    mask=_mask(problem),
                    take_turns=settings.take_turns,
                    grouped=problem.group_size > 1,
                    shifted=diagonal > 0,
                    consumer_registers=settings.consumer_registers,
                ),
            ),
            descriptors=[_tile_descriptors(*tensor, problem.dtype) for tensor in zip(operands, rows, strict=True)],
            **_OPTIONS,
        )
        self._add_launch(launch, *self.tensor_names, "schedule")


class HopperBackwardPlan(BackwardPlan):
    """The launches of a fused backward: the Hopper kernel between one that prepares and one that converts dQ."""

    # A multiprocessor has room for one program. 4x25x512x64: 0.0467 ms, otherwise 0.0492; 8x16x512x64: 0.0556, 0.0578.
    _at_once = True

    def _add_launches(self, deterministic: bool) -> None:
        self.fused, self._num_splits, self._takes_turns = True, 1, deterministic
        self._settings = hopper_backward_settings(self._problem, deterministic)
        window, key_rows = self._problem.window, self._settings.key_rows
        self._window_tiles = 0 if window is None else schedule.tiles_of_window(window, BACKWARD_QUERY_ROWS, key_rows)
        self._pad(BACKWARD_QUERY_ROWS, key_rows)
        self._add_prepared([self._only_pass()])

    def _ordered_items(self) -> list[tuple[int, int]]:
        """Return (tile of keys, sequence of keys) of all items, in the order in which programs should begin them."""
        problem = self._problem
        num_tiles = triton.cdiv(problem.num_keys, self._settings.key_rows)
        streamed_bytes = problem.num_queries * self._row_bytes() * problem.group_size
        per_group = sequences_per_group(problem.num_key_sequences, streamed_bytes, BACKWARD_L2_BYTES)
        if problem.group_size > 1:
            # The queries of grouped heads fill L2 with few sequences, whose items are fewer than the multiprocessors.
            # So take at least as many sequences as keep all of these busy, in groups of about one size.
            at_a_time = max(per_group, triton.cdiv(problem.num_multiprocessors, num_tiles))
            per_group = triton.cdiv(problem.num_key_sequences, max(1, problem.num_key_sequences // at_a_time))
        # Under a causal mask the first keys have the most queries. But in turns items wait for those of later keys.
        items = list(
            schedule.ordered_items(num_tiles, problem.num_key_sequences, per_group, last_tile_first=self._takes_turns)
        )
        if self._takes_turns and _mask(problem) == CAUSAL.value and problem.head_dim >= 128:
            # Time over that without turns, sorted like this and not: 1x16x16384x128 1.084, 1.101; 8x16x2048x128 1.156,
            # 1.165; 1x16x2048x128 1.26, 1.35; 1x16x16384x256 1.023, 1.031. But 1x16x16384x64 1.092, 1.078.
            items = schedule.longest_first_at_the_end(items, int(BEGUN_TOGETHER * problem.num_multiprocessors))
        return items

    def _only_pass(self) -> Launch:
        """Cut items into pieces, schedule both, and return the launch of the kernel that computes them."""
        problem, settings = self._problem, self._settings
        items = self._ordered_items()
        self._num_whole, self._num_pieces = self._cut(items)
        self._num_cut = len(items) - self._num_whole
        num_programs = self._num_whole + self._num_cut * self._num_pieces
        # A program loads its next item while it ends one: one on each multiprocessor computes them all. In turns, and
        # where shared memory has no room for two items' keys, each program has one item.
        shared_by = 0
        if settings.kernel != "wide" and not self._takes_turns:
            num_programs = shared_by = min(num_programs, problem.num_multiprocessors)
        num_visits = self._num_visits()
        costs = [WHOLE_COST + visits for visits in num_visits]  # Of whole items, by tile, and then of pieces.
        costs += [PIECE_COST + triton.cdiv(visits, self._num_pieces) for visits in num_visits]
        table = schedule.as_table_of_pieces(items, self._num_whole, self._num_pieces, costs, shared_by)
        # The table ends with the items, and these with those in pieces.
        self._first_cut = len(table) - self._num_cut
        self._add_tensor("schedule", torch.tensor(table, dtype=torch.int32, device=self._device))
        lengths = problem.num_queries, problem.num_keys
        scales = problem.scale, problem.scale * math.log2(math.e)
        mask = problem.window or 0, self._window_tiles, problem.diagonal
        return Launch(
            _BACKWARD_KERNELS[settings.kernel],
            num_programs,
            numbers=(self._num_key_heads, *lengths, self._padded_queries, *scales, problem.group_size, *mask),
            constants=(
                HopperBackwardConfig(
                    head_dim=problem.head_dim,
                    stages=settings.num_stages,
                    mask=_mask(problem),
                    ordered=self._takes_turns,
                    # Shifted and not grouped, head dimension 256 spills 232 bytes (triton 3.6), grouped none.
                    grouped=problem.group_size > 1 or problem.diagonal > 0,
                    cut=self._num_cut > 0,
                    shifted=problem.diagonal > 0,
                    **settings.registers,
                ),
            ),
            descriptors=self._only_pass_descriptors(),
            **_BACKWARD_OPTIONS,
        )

    def _row_bytes(self) -> int:
        """Return the bytes that a program streams for one query: query, gradient of the output, and the sum of dQ."""
        return self._problem.head_dim * (2 * self._problem.dtype.itemsize + 4)

    def _num_visits(self) -> list[int]:
        """Return, for each tile of keys, how many visits to tiles of queries an item of it makes."""
        problem = self._problem
        of_queries = problem.num_queries, BACKWARD_QUERY_ROWS, problem.is_causal, self._window_tiles
        tiles = (
            schedule.query_tiles(max(0, first_key - problem.diagonal), *of_queries)
            for first_key in range(0, problem.num_keys, self._settings.key_rows)
        )
        return [max(0, end - first) * problem.group_size for first, end in tiles]

    def _cut(self, items: Sequence[tuple[int, int]]) -> tuple[int, int]:
        """Return (items that stay whole, pieces of each other item); none is cut where programs add to dQ in turn."""
        problem = self._problem
        # Of items that share no keys only those of this kernel were measured in pieces (docs/kernels.md), in full
        # attention: under a causal mask short items fill the end.
        is_cut = problem.group_size > 1 or (self._settings.kernel == "exchange" and not problem.is_causal)
        if self._takes_turns or not is_cut:
            return len(items), 1
        num_visits = self._num_visits()
        # Causal programs drift apart: small pieces keep their queries in L2. Of a window these are few; without a mask
        # all programs visit the same at the same time.
        least_pieces = self._least_pieces(len(num_visits)) if _mask(problem) == CAUSAL.value else 1
        costs = WHOLE_COST, PIECE_COST
        return schedule.cut_all(items, num_visits, problem.num_multiprocessors, costs, least_pieces)

    def _least_pieces(self, num_tiles: int) -> int:
        """Return pieces of so few heads each that the programs of ``num_tiles`` tiles of keys find their queries in L2.

        Under a causal mask the program of the next keys sees two tiles of queries fewer in each head, so that with each
        head it gets two more ahead. With head dimension 64 and 128, 32 heads of queries and 8, 4 or 1 of keys, 8192 and
        2048 long, the number derived from that takes at most 6 % longer than the best of 1, 2, 4, 8 and 16 pieces. With
        256 two heads are best: 8192 long and 1 head of keys 6.96 ms, with four 8.05.
        """
        problem = self._problem
        if self._settings.kernel == "wide":
            return triton.cdiv(problem.group_size, 2)
        bytes_of_head = problem.num_queries * self._row_bytes()
        if problem.num_sequences * bytes_of_head <= BACKWARD_L2_BYTES:
            return 1  # The queries of all heads fit.
        bytes_of_heads = bytes_of_head * problem.num_multiprocessors // num_tiles  # One of each group that runs.
        # On average the programs of a piece are spread over half its heads: it may have twice as many as fit into L2.
        return triton.cdiv(problem.group_size, max(1, 2 * BACKWARD_L2_BYTES // bytes_of_heads))

    def _only_pass_descriptors(self) -> list[Descriptors]:
        """Return the kernel's first arguments: query, key, value, dO, statistics, reducer's sum of dQ, dK and dV."""
        dtype, head_dim = self._problem.dtype, self._problem.head_dim
        # Of each sequence the row of logsumexps that prepare_kernel wrote, and below it the row of D = rowsum(dO * O).
        statistics = (2 * self._problem.num_sequences, self._padded_queries)
        descriptors: list[Descriptors] = [
            *(_tile_descriptors(operand, WARPGROUP_ROWS, dtype) for operand in self._operands),
            GluonDescriptors(statistics, (self._padded_queries, 1), [1, BACKWARD_QUERY_ROWS], torch.float32),
        ]
        if self._settings.kernel == "reducer":
            # In the order of convert.py: a row is what one warp holds of 8 columns, four numbers in each of 32 threads.
            rows = self._problem.num_sequences * self._padded_queries * head_dim // 128
            tile = [BACKWARD_QUERY_ROWS * head_dim // 128, 128]
            descriptors.append(GluonDescriptors((rows, 128), (128, 1), tile, torch.float32, swizzled=False))
        # The kernel writes no dQ: another one makes it of the sum.
        descriptors += (_tile_descriptors(operand, WARPGROUP_ROWS, dtype) for operand in self._grad_operands[1:])
        return descriptors

    def _tensors_of_pass(self, statistics: str, grad_query_sum: str, grads: Sequence[str]) -> Sequence[str]:
        _, *key_grads = grads  # The reducer adds to the sum of dQ by TMA, so that the sum stands among the descriptors.
        results = *key_grads, grad_query_sum
        if self._settings.kernel == "reducer":
            results = grad_query_sum, *key_grads
        turns = "turns" if self._takes_turns else statistics  # stands in for what is not touched
        pieces = statistics
        if self._num_cut:
            rows = self._num_cut * self._num_pieces * 2 * self._settings.key_rows  # 2: of dK and of dV.
            pieces = self._add_tensor("pieces", Scratch((rows, self._problem.head_dim)))
        return *self._read_by_pass, statistics, *results, turns, pieces, "schedule"

    def _add_convert(self, sums: Sequence[str], rows: int, key_sums: bool) -> None:  # The last two: BackwardPlan's.
        problem, (grad_query_sum, *_) = self._problem, sums
        grad_query_strides, *key_strides = self._grad_strides
        num_tiles = self._padded_queries // BACKWARD_QUERY_ROWS
        # The reducer has whole tiles, elsewhere each of two warpgroups half of the head dimension.
        columns_of_tile = problem.head_dim // (1 if self._settings.kernel == "reducer" else 2)
        convert = Launch(
            convert_register_order_kernel,
            problem.num_sequences * num_tiles,
            numbers=(grad_query_strides, num_tiles, self._num_heads, problem.num_queries, problem.scale),
            constants=(problem.head_dim, columns_of_tile, True),  # True: launched early.
            **_BACKWARD_OPTIONS,
        )
        self._add_launch(convert, grad_query_sum, "grad_query")
        if self._num_cut:
            num_tiles = self._settings.key_rows // WARPGROUP_ROWS
            columns, at_a_time = SUMMED_OF_ONE_HEAD if problem.group_size == 1 else SUMMED_OF_GROUP
            sum_pieces = Launch(
                sum_pieces_kernel,
                self._num_cut * num_tiles * (problem.head_dim // columns),
                numbers=(*key_strides, self._first_cut, self._num_pieces, self._num_key_heads, problem.num_keys),
                constants=(problem.head_dim, num_tiles, columns, at_a_time),
            )
            self._add_launch(sum_pieces, "pieces", "grad_key", "grad_value", "schedule")
