"""From tensors to launches of the Hopper kernels, in the way of triton/plans.py."""

import math
from collections.abc import Sequence

import torch
import triton
from triton.experimental.gluon import language as gl

from cs336sys.kernels.attention.hopper.backward import backward_kernel
from cs336sys.kernels.attention.hopper.backward_reducer import reducer_backward_kernel
from cs336sys.kernels.attention.hopper.backward_wide import wide_backward_kernel
from cs336sys.kernels.attention.hopper.convert import convert_register_order_kernel, sum_pieces_kernel
from cs336sys.kernels.attention.hopper.forward import forward_kernel
from cs336sys.kernels.attention.hopper.gluon import TensorDescriptor
from cs336sys.kernels.attention.hopper.schedule import (
    as_table,
    as_table_of_pieces,
    cut_the_rest,
    key_tiles,
    longest_first_at_the_end,
    ordered_items,
    share_out,
)
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
from cs336sys.kernels.attention.problem import Operand, Problem
from cs336sys.kernels.attention.triton.plans import BackwardPlan

# The rows of one warpgroup's tile, in both kernels.
WARPGROUP_ROWS = 64
# A program of the backward kernel streams tiles of these many queries.
BACKWARD_QUERY_ROWS = 64

# Of the multiprocessors, each of which runs one program: how many programs that add to dQ in turn may begin before one
# that they wait for. If other kernels kept more than the rest to themselves, it would never begin.
BEGUN_TOGETHER = 0.75

# What a piece of an item takes beside its tiles of queries, in tiles: its keys and values, and dK and dV to be summed.
PIECE_COST = 5

_BACKWARD_KERNELS = {
    "exchange": backward_kernel,
    "reducer": reducer_backward_kernel,
    "wide": wide_backward_kernel,
}

_GLUON_DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}

# The four warps of the first consumer; those of the other partitions come on top.
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}


class GluonDescriptors(Descriptors):
    """TMA descriptors that also know how their tile lies in shared memory: swizzled by the bytes of a row, at most 128.

    So the tensor cores read 16-bit operands; one row lies as it is, and what is not ``swizzled``.
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
        layout = gl.NVMMASharedLayout(0, 8 * dtype.itemsize, len(block_shape))
        if swizzled:
            layout = gl.NVMMASharedLayout.get_default_for(block_shape, _GLUON_DTYPES[dtype])
        self._layout = (*self._layout, layout)


def _tile_descriptors(operand: Operand, rows: int, dtype: torch.dtype) -> GluonDescriptors:
    return GluonDescriptors(operand.shape, operand.strides, [1, 1, rows, operand.shape[3]], dtype)


def _table(rows: list[tuple[int, int]], device: torch.device) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32, device=device)


class HopperForwardPlan(Plan):
    """The launch of the forward kernel."""

    given = FORWARD_TENSORS

    def __init__(self, problem: Problem, operands: Sequence[Operand], device: torch.device):
        """``operands``: query, key, value and output."""
        super().__init__(device)
        settings = hopper_forward_settings(problem)
        rows = WARPGROUP_ROWS, settings.key_rows, settings.key_rows, WARPGROUP_ROWS
        item_rows, lengths = settings.item_rows, (problem.num_queries, problem.num_keys)
        costs = [
            1 + key_tiles(first_query, item_rows, *lengths, settings.key_rows, problem.is_causal)[1]
            for first_query in range(0, problem.num_queries, item_rows)
        ]
        # In full attention one sequence after another: then nearly all programs read the same keys at the same time.
        # 1x16x16384x128: 3.001 ms, in groups that fill L2 3.063; 1x16x16384x64: 1.854, 1.885.
        per_group = 1
        if problem.is_causal:
            streamed_bytes = 2 * problem.num_keys * problem.head_dim * problem.dtype.itemsize
            per_group = sequences_per_group(problem.num_sequences, streamed_bytes, FORWARD_L2_BYTES)
        items = ordered_items(len(costs), problem.num_sequences, per_group, last_tile_first=problem.is_causal)
        num_programs = len(costs) * problem.num_sequences
        if settings.persistent:
            num_programs = min(num_programs, problem.num_multiprocessors)
        schedule = self._own("schedule", _table(as_table(share_out(items, costs, num_programs)), device))
        launch = Launch(
            forward_kernel,
            num_programs,
            (
                operands[0].shape[1],
                *lengths,
                math.log2(math.e) / math.sqrt(problem.head_dim),
            ),
            (
                problem.head_dim,
                settings.consumers,
                settings.key_rows,
                settings.num_stages,
                problem.is_causal,
                settings.take_turns,
                settings.consumer_registers,
            ),
            [_tile_descriptors(operand, n, problem.dtype) for operand, n in zip(operands, rows, strict=True)],
            **_OPTIONS,
        )
        self._then(launch, *self.given, schedule)


class HopperBackwardPlan(BackwardPlan):
    """The launches of a fused backward: the Hopper kernel between one that prepares and one that converts dQ."""

    def _add_launches(self, deterministic: bool) -> None:
        self.fused, self._num_splits, self._takes_turns = True, 1, deterministic
        self._settings = hopper_backward_settings(self._problem)
        self._pad(BACKWARD_QUERY_ROWS, self._settings.key_rows)
        self._add_prepared([self._only_pass()])

    def _only_pass(self) -> Launch:
        problem, settings = self._problem, self._settings
        row_bytes = problem.head_dim * (2 * problem.dtype.itemsize + 4)
        per_group = sequences_per_group(problem.num_sequences, problem.num_queries * row_bytes, BACKWARD_L2_BYTES)
        num_tiles = triton.cdiv(problem.num_keys, settings.key_rows)
        # The first keys have the most queries under a causal mask. But who adds to dQ in turn waits for later keys.
        items = list(ordered_items(num_tiles, problem.num_sequences, per_group, last_tile_first=self._takes_turns))
        if self._takes_turns and problem.is_causal and problem.head_dim >= 128:
            # Over the backward pass in any order, 1x16x16384x128: 1.084, not turned round 1.101; 8x16x2048x128: 1.156,
            # 1.165; 1x16x2048x128: 1.26, 1.35; 1x16x16384x256: 1.023, 1.031. But 1x16x16384x64: 1.092, 1.078.
            items = longest_first_at_the_end(items, int(BEGUN_TOGETHER * problem.num_multiprocessors))
        self._num_whole, self._num_pieces = len(items), 1
        exchange = settings.kernel == "exchange"
        if exchange and not self._takes_turns and not problem.is_causal:
            query_tiles = self._padded_queries // BACKWARD_QUERY_ROWS
            self._num_whole, self._num_pieces = cut_the_rest(
                len(items), problem.num_multiprocessors, query_tiles, PIECE_COST
            )
        self._num_cut = len(items) - self._num_whole
        num_programs = self._num_whole + self._num_cut * self._num_pieces
        self._own("schedule", _table(as_table_of_pieces(items, self._num_whole, self._num_pieces), self._device))
        scale = 1.0 / math.sqrt(problem.head_dim)
        return Launch(
            _BACKWARD_KERNELS[settings.kernel],
            num_programs,
            (
                self._operands[0].shape[1],
                problem.num_queries,
                problem.num_keys,
                self._padded_queries,
                scale,
                scale * math.log2(math.e),
            ),
            (
                problem.head_dim,
                settings.num_stages,
                problem.is_causal,
                self._takes_turns,
                *([self._num_cut > 0] if exchange else []),
                *settings.registers,
            ),
            self._only_pass_descriptors(),
            **_OPTIONS,
        )

    def _only_pass_descriptors(self) -> list[Descriptors]:
        dtype, head_dim = self._problem.dtype, self._problem.head_dim
        statistics = (2 * self._problem.num_sequences, self._padded_queries)
        descriptors: list[Descriptors] = [
            *(_tile_descriptors(operand, WARPGROUP_ROWS, dtype) for operand in self._operands),
            GluonDescriptors(statistics, (self._padded_queries, 1), [1, BACKWARD_QUERY_ROWS], torch.float32),
        ]
        if self._settings.kernel == "reducer":
            # What a warpgroup holds in four registers, four numbers of 32 threads, is a row.
            rows = self._problem.num_sequences * self._padded_queries * head_dim // 128
            tile = [BACKWARD_QUERY_ROWS * head_dim // 128, 128]
            descriptors.append(GluonDescriptors((rows, 128), (128, 1), tile, torch.float32, swizzled=False))
        descriptors += (_tile_descriptors(operand, WARPGROUP_ROWS, dtype) for operand in self._grad_operands[1:])
        return descriptors

    def _tensors_of_pass(self, statistics: str, grad_query_sum: str, grads: Sequence[str]) -> Sequence[str]:
        # The kernel adds dQ to its sum, the reducer by TMA, the others by address.
        results = *grads[1:], grad_query_sum
        if self._settings.kernel == "reducer":
            results = grad_query_sum, *grads[1:]
        turns = "turns" if self._takes_turns else statistics  # stands in for what is not touched
        own = [turns, "schedule"]
        if self._settings.kernel == "exchange":
            rows = self._num_cut * self._num_pieces * 2 * self._settings.key_rows
            pieces = Scratch((rows, self._problem.head_dim))
            own.insert(1, self._own("pieces", pieces) if self._num_cut else statistics)
        return *self._read_by_pass, statistics, *results, *own

    def _add_convert(self, sums: Sequence[str], rows: int, key_sums: bool) -> None:
        problem = self._problem
        num_tiles = self._padded_queries // BACKWARD_QUERY_ROWS
        convert = Launch(
            convert_register_order_kernel,
            problem.num_sequences * num_tiles,
            (
                self._grad_strides[0],
                num_tiles,
                self._operands[0].shape[1],
                problem.num_queries,
                1.0 / math.sqrt(problem.head_dim),
            ),
            # The reducer has whole tiles, otherwise each of two warpgroups half of the head dimension.
            (problem.head_dim, problem.head_dim // (1 if self._settings.kernel == "reducer" else 2)),
        )
        self._then(convert, sums[0], "grad_query")
        if self._num_cut:
            sum_pieces = Launch(
                sum_pieces_kernel,
                2 * self._num_cut,
                (
                    *self._grad_strides[1:],
                    self._num_whole,
                    self._num_pieces,
                    self._operands[0].shape[1],
                    problem.num_keys,
                ),
                (problem.head_dim,),
            )
            self._then(sum_pieces, "pieces", "grad_key", "grad_value", "schedule")
