"""From tensors to launches: how the Triton attention kernels are given their grids, strides, tiles and descriptors.

A plan is made once for tensors of given shapes, strides, dtype and device, and then called with such tensors, all of
them 16-byte aligned with elements side by side.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton

from cs336sys.kernels.attention.plan import Descriptors, Launch
from cs336sys.kernels.attention.triton.backward import backward_kernel, convert_grad_query_kernel, prepare_kernel
from cs336sys.kernels.attention.triton.forward import combine_kernel, forward_kernel
from cs336sys.kernels.attention.triton.settings import (
    BackwardPass,
    BackwardSettings,
    Problem,
    TileSettings,
    backward_settings,
    forward_settings,
    has_hopper_shared_memory,
)

# What FlashAttention-3 lets the operands that concurrent programs stream fill of the L2 cache, 50 MB on H100 and H200.
FORWARD_L2_BYTES = 32 * 2**20
BACKWARD_L2_BYTES = 40 * 2**20

# A program of the two elementwise backward kernels takes this many elements, 32 in each of its 128 threads.
ELEMENTWISE_TILE = 4096

# Of the kernel that combines what programs found in parts of the keys; 1x1x2048 leaves 128 programs.
COMBINED_ROWS = 16


class Operand:
    """How the kernels address a tensor of two to four dimensions: as (batch, head, row, element)."""

    def __init__(self, tensor: torch.Tensor):
        leading = (1,) * (4 - tensor.dim())
        self.shape = (*leading, *tensor.shape)
        strides = [*leading, *tensor.stride()]
        for dim in (2, 1, 0):
            if self.shape[dim] == 1:  # any stride will do; a descriptor wants this one
                strides[dim] = self.shape[dim + 1] * strides[dim + 1]
        self.strides = tuple(strides)
        self.row_strides = self.strides[:3]
        element_bytes = tensor.element_size()
        self.fits_tma = all(stride > 0 and stride * element_bytes % 16 == 0 for stride in self.row_strides)

    def descriptors(self, rows: int, block_dim: int) -> Descriptors:
        return Descriptors(self.shape, self.strides, [1, 1, rows, block_dim])


def make_problem(
    query: torch.Tensor, key: torch.Tensor, operands: Sequence[Operand], is_causal: bool, float32_precision: str
) -> Problem:
    num_sequences = math.prod(query.shape[:-2])
    num_queries, num_keys = query.shape[-2], key.shape[-2]
    capability, num_multiprocessors = None, 1
    if query.is_cuda:
        properties = torch.cuda.get_device_properties(query.device)
        capability, num_multiprocessors = (properties.major, properties.minor), properties.multi_processor_count
    # TMA coordinates have 32 bits, and the sum of dQ is addressed as one tall matrix.
    fits_tma = all(operand.fits_tma for operand in operands) and num_sequences * (num_queries + 256) < 2**31
    return Problem(
        head_dim=query.shape[-1],
        dtype=query.dtype,
        float32_precision=float32_precision,
        is_causal=is_causal,
        num_sequences=num_sequences,
        num_queries=num_queries,
        num_keys=num_keys,
        capability=capability,
        num_multiprocessors=num_multiprocessors,
        # 12.x has TMA, but not the shared memory.
        tma_allowed=fits_tma and capability is not None and has_hopper_shared_memory(capability),
    )


def _block_dim(problem: Problem) -> int:
    """The head dimension of tiles: a power of two, and at least the 16 that ``tl.dot`` needs."""
    return max(16, triton.next_power_of_2(problem.head_dim))


def _dot_precision(problem: Problem) -> str:
    return problem.float32_precision if problem.dtype == torch.float32 else "ieee"


def sequences_per_group(num_sequences: int, bytes_per_sequence: int, l2_bytes: int) -> int:
    """As many sequences as fit in L2 together, in groups of about equal size."""
    num_groups = triton.cdiv(num_sequences, max(1, l2_bytes // bytes_per_sequence))
    return triton.cdiv(num_sequences, num_groups)


def _options(tile: TileSettings) -> dict:
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "enable_fp_fusion": True}
    if tile.max_registers is not None:
        options["maxnreg"] = tile.max_registers
    return options


@dataclass(frozen=True)
class Scratch:
    """A float32 tensor (rows, columns) that lives for one call of a plan."""

    shape: tuple[int, int]

    @property
    def strides(self) -> tuple[int, int]:
        return self.shape[1], 1

    def allocate(self, device: torch.device) -> torch.Tensor:
        # torch.empty takes 2.4 us where this takes 0.9.
        return torch.empty_strided(self.shape, self.strides, dtype=torch.float32, device=device)


class Plan:
    """Launches over named tensors: those that the plan is called with, in the order of ``given``, and its own.

    Attributes:
        own: what follows the given tensors: scratch tensors and constants.
        steps: every launch with the numbers of its tensors.
        is_direct: tensors of this signature are on a GPU and go to the kernels as they are.
        result_layouts: shape, strides and dtype of each result.
    """

    given: Sequence[str]
    is_direct: bool
    result_layouts: Sequence[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]

    def __init__(self, device: torch.device):
        self._device = device
        self._numbers = {name: number for number, name in enumerate(self.given)}
        self.own: list[Scratch | torch.Tensor] = []
        self.steps: list[tuple[Launch, tuple[int, ...]]] = []

    def _own(self, name: str, one: Scratch | torch.Tensor) -> str:
        self._numbers[name] = len(self._numbers)
        self.own.append(one)
        return name

    def _then(self, launch: Launch, *names: str) -> None:
        self.steps.append((launch, tuple(self._numbers[name] for name in names)))

    def __call__(self, *tensors: torch.Tensor) -> None:
        slots = list(tensors)
        slots += (one.allocate(self._device) if isinstance(one, Scratch) else one for one in self.own)
        for launch, numbers in self.steps:
            launch(*[slots[number] for number in numbers])


class ForwardPlan(Plan):
    """The launches of the forward kernels: one, and if programs share keys a second that combines what they find."""

    given = ("query", "key", "value", "out", "logsumexp")

    def __init__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        is_causal: bool,
        float32_precision: str,
    ):
        super().__init__(query.device)
        operands = [Operand(tensor) for tensor in (query, key, value, out)]
        problem = make_problem(query, key, operands, is_causal, float32_precision)
        settings = forward_settings(problem)
        tile, key_parts = settings.tile, settings.key_parts
        block_dim = _block_dim(problem)
        num_heads, out_strides = operands[0].shape[1], operands[3].row_strides
        results = "out", "logsumexp"
        if key_parts > 1:
            num_rows = problem.num_sequences * problem.num_queries
            partial_strides = num_rows * problem.head_dim, problem.num_queries * problem.head_dim, problem.head_dim
            combine = Launch(
                combine_kernel,
                problem.num_sequences * triton.cdiv(problem.num_queries, COMBINED_ROWS),
                (partial_strides, out_strides, num_heads, problem.num_sequences, problem.num_queries),
                (problem.head_dim, block_dim, COMBINED_ROWS, key_parts),
            )
            out_strides = partial_strides
            partial = self._own("partial", Scratch((key_parts * num_rows, problem.head_dim + 1)))
            results = partial, partial
        descriptors = []
        if tile.use_tma:
            rows = tile.query_rows, tile.key_rows, tile.key_rows
            descriptors = [one.descriptors(n, block_dim) for one, n in zip(operands[:3], rows, strict=True)]
        streamed_bytes = 2 * problem.num_keys * problem.head_dim * key.element_size()
        launch = Launch(
            forward_kernel,
            key_parts * problem.num_sequences * triton.cdiv(problem.num_queries, tile.query_rows),
            (
                *(operand.row_strides for operand in operands[:3]),
                out_strides,
                num_heads,
                problem.num_sequences,
                problem.num_queries,
                problem.num_keys,
                sequences_per_group(problem.num_sequences, streamed_bytes, FORWARD_L2_BYTES),
                math.log2(math.e) / math.sqrt(problem.head_dim),
            ),
            (
                problem.head_dim,
                block_dim,
                tile.query_rows,
                tile.key_rows,
                is_causal,
                key_parts,
                _dot_precision(problem),
                tile.use_tma,
            ),
            descriptors,
            **_options(tile),
        )
        self._then(launch, "query", "key", "value", *results)
        if key_parts > 1:
            self._then(combine, partial, "out", "logsumexp")


class BackwardPlan(Plan):
    """The launches of the backward kernels: prepare if need be, one or two passes, and in the fused form convert."""

    given = ("query", "key", "value", "out", "logsumexp", "grad_out", "grad_query", "grad_key", "grad_value")

    def __init__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        grad_out: torch.Tensor,
        grads: Sequence[torch.Tensor],
        is_causal: bool,
        float32_precision: str,
        deterministic: bool,
    ):
        super().__init__(query.device)
        self._operands = [Operand(tensor) for tensor in (query, key, value, grad_out)]
        self._out_strides = Operand(out).row_strides
        self._problem = problem = make_problem(query, key, self._operands, is_causal, float32_precision)
        settings = self._settings(problem, deterministic)
        self.fused = settings.fused
        self._prepared = settings.prepared
        self._query_parts = settings.query_parts
        self._block_dim = _block_dim(problem)
        query_rows = max(one.tile.query_rows for one in settings.passes)
        key_rows = settings.passes[0].tile.key_rows
        self._padded_queries = triton.cdiv(problem.num_queries, query_rows) * query_rows
        self._padded_keys = triton.cdiv(problem.num_keys, key_rows) * key_rows
        self._grad_operands = [Operand(grad) for grad in grads]
        self._grad_strides = [operand.row_strides for operand in self._grad_operands]
        if settings.prepared:
            self._add_prepared_passes(settings.passes)
            return
        for one in settings.passes:
            # The logsumexp also stands in for the sum of dQ, which is not touched.
            sums = "logsumexp", "logsumexp"
            self._then(self._pass_launch(one), "query", "key", "value", "grad_out", *sums, *self.given[6:], "out")

    def _add_prepared_passes(self, passes: Sequence[BackwardPass]) -> None:
        problem, grads = self._problem, self.given[6:]
        num_heads = self._operands[0].shape[1]
        rows = max(16, min(128, ELEMENTWISE_TILE // self._block_dim))
        key_sums = self._query_parts > 1
        summed_keys = self._padded_keys if key_sums else 0
        num_tiles = triton.cdiv(max(self._padded_queries, summed_keys), rows)
        prepare = Launch(
            prepare_kernel,
            problem.num_sequences * num_tiles,
            (
                self._out_strides,
                self._operands[3].row_strides,
                num_tiles,
                num_heads,
                problem.num_queries,
                self._padded_queries,
                self._padded_keys,
            ),
            (problem.head_dim, self._block_dim, rows, self.fused, key_sums),
        )
        convert = Launch(
            convert_grad_query_kernel,
            problem.num_sequences * num_tiles,
            (
                *self._grad_strides,
                num_tiles,
                num_heads,
                problem.num_queries,
                problem.num_keys,
                self._padded_queries,
                self._padded_keys,
                1.0 / math.sqrt(problem.head_dim),
            ),
            (problem.head_dim, self._block_dim, rows, key_sums),
        )
        statistics = self._own("statistics", Scratch((2 * problem.num_sequences, self._padded_queries)))
        sums = [statistics] * 3  # stands in for what the form does not touch
        results = grads
        if self.fused:
            num_rows = problem.num_sequences * self._padded_queries
            sums[0] = self._own("grad_query_sum", Scratch((num_rows, self._block_dim)))
        if key_sums:
            key_sum = Scratch((problem.num_sequences * self._padded_keys, self._block_dim))
            sums[1:] = (self._own(name, key_sum) for name in ("grad_key_sum", "grad_value_sum"))
            results = grads[0], *sums[1:]
        self._then(prepare, "out", "grad_out", "logsumexp", statistics, *sums)
        for one in passes:
            launch = self._pass_launch(one)
            read = "query", "key", "value", "grad_out", statistics, sums[0]
            self._then(launch, *read, *self._results_of_pass(results))
        if self.fused:
            self._then(convert, *sums, *grads)

    def _pass_launch(self, one: BackwardPass) -> Launch:
        problem, tile = self._problem, one.tile
        element_bytes = problem.dtype.itemsize
        if one.keys:
            row_bytes = problem.head_dim * 2 * element_bytes + (4 * self._block_dim if self.fused else 0)
            streamed_bytes, l2_bytes = problem.num_queries * row_bytes, BACKWARD_L2_BYTES
        else:
            streamed_bytes, l2_bytes = 2 * problem.num_keys * problem.head_dim * element_bytes, FORWARD_L2_BYTES
        key_tiles = triton.cdiv(problem.num_keys, tile.key_rows)
        key_programs = problem.num_sequences * key_tiles * self._query_parts if one.keys else 0
        query_programs = problem.num_sequences * triton.cdiv(problem.num_queries, tile.query_rows) if one.queries else 0
        scale = 1.0 / math.sqrt(problem.head_dim)
        return Launch(
            backward_kernel,
            key_programs + query_programs,
            (
                *(operand.row_strides for operand in self._operands),
                *self._grad_strides,
                self._out_strides,
                self._operands[0].shape[1],
                problem.num_sequences,
                problem.num_queries,
                self._padded_queries,
                problem.num_keys,
                sequences_per_group(problem.num_sequences, streamed_bytes, l2_bytes),
                key_programs,
                self._query_parts,
                scale,
                scale * math.log2(math.e),
            ),
            (
                problem.head_dim,
                self._block_dim,
                tile.query_rows,
                tile.key_rows,
                problem.is_causal,
                one.keys,
                one.queries,
                self._prepared,
                self.fused,
                self._query_parts > 1,
                _dot_precision(problem),
                tile.use_tma,
            ),
            self._pass_descriptors(tile),
            **_options(tile),
        )

    def _settings(self, problem: Problem, deterministic: bool) -> BackwardSettings:
        return backward_settings(problem, deterministic)

    def _results_of_pass(self, grads: Sequence[str]) -> Sequence[str]:
        """What a prepared pass is given to write the gradients of query, key and value to, and all behind it."""
        return *grads, grads[0]  # stands in for the output

    def _pass_descriptors(self, tile: TileSettings) -> list[Descriptors]:
        """For what a pass reads: query, key, value, gradient of the output, statistics, and the sum of dQ if fused.

        Passes that are not prepared have no statistics and read the logsumexp and the output by address.
        """
        if not tile.use_tma:
            return []
        rows = tile.query_rows, tile.key_rows, tile.key_rows, tile.query_rows
        descriptors = [one.descriptors(n, self._block_dim) for one, n in zip(self._operands, rows, strict=True)]
        if not self._prepared:
            return descriptors
        padded_queries = self._padded_queries
        statistics = (2 * self._problem.num_sequences, padded_queries)
        descriptors.append(Descriptors(statistics, (padded_queries, 1), [1, tile.query_rows]))
        if self.fused:
            sums = (self._problem.num_sequences * padded_queries, self._block_dim)
            descriptors.append(Descriptors(sums, (self._block_dim, 1), [tile.query_rows, self._block_dim]))
        return descriptors
