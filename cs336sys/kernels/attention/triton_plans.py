"""From tensors to launches: how the Triton attention kernels are given their grids, strides, tiles and descriptors.

A plan is made once for tensors of given shapes, strides, dtype and device, and then called with such tensors, all of
them 16-byte aligned with elements side by side.
"""

import math
from collections.abc import Sequence

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from cs336sys.kernels.attention.launch_settings import (
    BackwardPass,
    BackwardSettings,
    Problem,
    TileSettings,
    backward_settings,
    forward_settings,
)
from cs336sys.kernels.attention.triton_backward import backward_kernel, convert_grad_query_kernel, prepare_kernel
from cs336sys.kernels.attention.triton_forward import forward_kernel

# What FlashAttention-3 lets the operands that concurrent programs stream fill of the L2 cache, 50 MB on H100 and H200.
FORWARD_L2_BYTES = 32 * 2**20
BACKWARD_L2_BYTES = 40 * 2**20

# A program of the two elementwise backward kernels takes this many elements, 32 in each of its 128 threads.
ELEMENTWISE_TILE = 4096


class Launch:
    """A kernel with its grid, its numbers and its compile-time constants; called with its tensors and descriptors.

    From the second call on it bypasses Triton's binding of arguments, which takes longer than a small kernel runs. That
    is right because whatever Triton specialises on is fixed in a plan: the numbers, dtypes and alignment.
    """

    def __init__(self, kernel, num_programs: int, numbers: Sequence, constants: Sequence, **options):
        self._kernel = kernel
        self._grid = (num_programs, 1, 1)
        self._arguments = (*numbers, *constants)
        self._options = options
        self._compiled = None

    def __call__(self, *operands: torch.Tensor | TensorDescriptor) -> None:
        compiled = self._compiled
        if compiled is None:
            # The interpreter compiles nothing, returns None and is entered here every time.
            self._compiled = self._kernel[self._grid](*operands, *self._arguments, **self._options)
            return
        driver = triton.runtime.driver.active
        stream = driver.get_current_stream(driver.get_current_device())
        # An address instead of a tensor saves a query to the CUDA driver.
        addresses = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in operands]
        no_hooks = (None, None, None)
        compiled.run(
            *self._grid, stream, compiled.function, compiled.packed_metadata, *no_hooks, *addresses, *self._arguments
        )


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

    def descriptors(self, rows: int, block_dim: int) -> "Descriptors":
        return Descriptors(self.shape, self.strides, [1, 1, rows, block_dim])


class Descriptors:
    """TMA descriptors of one tensor after another, all with the same shape, strides, dtype and block.

    Only the first descriptor checks these: that takes 3 us, and a backward pass has up to ten descriptors.
    """

    descriptor_class = TensorDescriptor

    def __init__(self, shape: Sequence[int], strides: Sequence[int], block_shape: list[int]):
        self._layout = (shape, strides, block_shape)
        self._checked: dict | None = None

    def __call__(self, tensor: torch.Tensor) -> TensorDescriptor:
        if self._checked is None:
            self._checked = vars(self.descriptor_class(tensor, *self._layout)) | {"base": None}
        descriptor = object.__new__(self.descriptor_class)
        vars(descriptor).update(self._checked, base=tensor)
        return descriptor


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
        tma_allowed=fits_tma and capability is not None and capability >= (9, 0),
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


class ForwardPlan:
    """The launch of the forward kernel.

    Attributes:
        is_direct: tensors of this signature go to the kernel as they are, and the output has the query's strides.
    """

    is_direct = False

    def __init__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        is_causal: bool,
        float32_precision: str,
    ):
        operands = [Operand(tensor) for tensor in (query, key, value, out)]
        problem = make_problem(query, key, operands, is_causal, float32_precision)
        tile = forward_settings(problem)
        block_dim = _block_dim(problem)
        self._descriptors = None
        if tile.use_tma:
            rows = tile.query_rows, tile.key_rows, tile.key_rows
            self._descriptors = [one.descriptors(n, block_dim) for one, n in zip(operands[:3], rows, strict=True)]
        streamed_bytes = 2 * problem.num_keys * problem.head_dim * key.element_size()
        self._launch = Launch(
            forward_kernel,
            problem.num_sequences * triton.cdiv(problem.num_queries, tile.query_rows),
            (
                *(operand.row_strides for operand in operands),
                operands[0].shape[1],
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
                _dot_precision(problem),
                tile.use_tma,
            ),
            **_options(tile),
        )

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        logsumexp: torch.Tensor,
    ) -> None:
        operands = query, key, value
        if self._descriptors is not None:
            operands = [describe(tensor) for describe, tensor in zip(self._descriptors, operands, strict=True)]
        self._launch(*operands, out, logsumexp)


class BackwardPlan:
    """The launches of the backward kernels: prepare, one or two passes, and in the fused form convert.

    Attributes:
        is_direct: tensors of this signature are given to the kernels as they are, and each gradient has the strides of
            its tensor.
    """

    is_direct = False

    def __init__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        grad_out: torch.Tensor,
        grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        is_causal: bool,
        float32_precision: str,
        deterministic: bool,
    ):
        self._operands = [Operand(tensor) for tensor in (query, key, value, grad_out)]
        self._problem = problem = make_problem(query, key, self._operands, is_causal, float32_precision)
        settings = self._settings(problem, deterministic)
        self.fused = settings.fused
        self._block_dim = _block_dim(problem)
        query_rows = max(backward_pass.tile.query_rows for backward_pass in settings.passes)
        self._padded_queries = triton.cdiv(problem.num_queries, query_rows) * query_rows
        self._grad_strides = tuple(Operand(grad).row_strides for grad in grads)

        num_heads = self._operands[0].shape[1]
        rows = max(16, min(128, ELEMENTWISE_TILE // self._block_dim))
        self._prepare = Launch(
            prepare_kernel,
            problem.num_sequences * triton.cdiv(self._padded_queries, rows),
            (
                Operand(out).row_strides,
                self._operands[3].row_strides,
                num_heads,
                problem.num_queries,
                self._padded_queries,
            ),
            (problem.head_dim, self._block_dim, rows, self.fused),
        )
        self._passes = [(self._pass_descriptors(one.tile), self._pass_launch(one)) for one in settings.passes]
        self._convert = Launch(
            convert_grad_query_kernel,
            problem.num_sequences * triton.cdiv(problem.num_queries, rows),
            (
                self._grad_strides[0],
                num_heads,
                problem.num_queries,
                self._padded_queries,
                1.0 / math.sqrt(problem.head_dim),
            ),
            (problem.head_dim, self._block_dim, rows),
        )

    def _pass_launch(self, one: BackwardPass) -> Launch:
        problem, tile = self._problem, one.tile
        element_bytes = problem.dtype.itemsize
        if one.keys:
            row_bytes = problem.head_dim * 2 * element_bytes + (4 * self._block_dim if self.fused else 0)
            streamed_bytes, l2_bytes = problem.num_queries * row_bytes, BACKWARD_L2_BYTES
        else:
            streamed_bytes, l2_bytes = 2 * problem.num_keys * problem.head_dim * element_bytes, FORWARD_L2_BYTES
        key_programs = problem.num_sequences * triton.cdiv(problem.num_keys, tile.key_rows) if one.keys else 0
        query_programs = problem.num_sequences * triton.cdiv(problem.num_queries, tile.query_rows) if one.queries else 0
        scale = 1.0 / math.sqrt(problem.head_dim)
        return Launch(
            backward_kernel,
            key_programs + query_programs,
            (
                *(operand.row_strides for operand in self._operands),
                *self._grad_strides,
                self._operands[0].shape[1],
                problem.num_sequences,
                problem.num_queries,
                self._padded_queries,
                problem.num_keys,
                sequences_per_group(problem.num_sequences, streamed_bytes, l2_bytes),
                key_programs,
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
                self.fused,
                _dot_precision(problem),
                tile.use_tma,
            ),
            **_options(tile),
        )

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        logsumexp: torch.Tensor,
        grad_out: torch.Tensor,
        grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> None:
        num_sequences = self._problem.num_sequences
        statistics = logsumexp.new_empty((2 * num_sequences, self._padded_queries))
        grad_query_sum = statistics  # stands in for what the split form does not touch
        if self.fused:
            grad_query_sum = logsumexp.new_empty((num_sequences * self._padded_queries, self._block_dim))
        self._prepare(out, grad_out, logsumexp, statistics, grad_query_sum)
        tensors = query, key, value, grad_out, statistics, grad_query_sum
        for descriptors, launch in self._passes:
            operands = list(tensors)
            if descriptors is not None:
                # The last of the tensors has a descriptor only if it is written.
                operands[: len(descriptors)] = [
                    describe(tensor) for describe, tensor in zip(descriptors, tensors, strict=False)
                ]
            launch(*operands, *self._result_operands(grads))
        if self.fused:
            self._convert(grad_query_sum, grads[0])

    def _settings(self, problem: Problem, deterministic: bool) -> BackwardSettings:
        return backward_settings(problem, deterministic)

    def _result_operands(self, grads: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | TensorDescriptor]:
        """What a pass is given to write the gradients of query, key and value to."""
        return grads

    def _pass_descriptors(self, tile: TileSettings) -> list[Descriptors] | None:
        """For what a pass reads: query, key, value, gradient of the output, statistics, and the sum of dQ if fused."""
        if not tile.use_tma:
            return None
        rows = tile.query_rows, tile.key_rows, tile.key_rows, tile.query_rows
        descriptors = [one.descriptors(n, self._block_dim) for one, n in zip(self._operands, rows, strict=True)]
        padded_queries = self._padded_queries
        statistics = (2 * self._problem.num_sequences, padded_queries)
        descriptors.append(Descriptors(statistics, (padded_queries, 1), [1, tile.query_rows]))
        if self.fused:
            sums = (self._problem.num_sequences * padded_queries, self._block_dim)
            descriptors.append(Descriptors(sums, (self._block_dim, 1), [tile.query_rows, self._block_dim]))
        return descriptors
