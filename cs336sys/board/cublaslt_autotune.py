"""Matrix products by the algorithm of cuBLASLt that is fastest where they run.

cuBLAS chooses by a model of the GPU that ignores its power limit (docs/decisions/transformer-block.md): of products of
32,768 tokens with d_model 4096 and d_ff 11008 (bf16, H200) the best of its first eight took 2 to 6 % less time. Here
each product is timed with all of them when it first comes up, once for each GPU and shape in a process.

cuBLASLt: https://docs.nvidia.com/cuda/cublas/#using-the-cublaslt-api; numbers of its enumerations are cublasLt.h's.
"""

import ctypes
import functools
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cs336sys.kernels.operators import needs_operators

# Multiply-adds from which a product is measured: 0.2 ms of an H200, when a call from here takes 0.02 ms of the CPU.
LEAST_MULTIPLY_ADDS = 2**36

# The alignment of addresses that the heuristic assumes, and scratch memory, as much as PyTorch gives it on Hopper.
_ALIGNMENT_BYTES = 256
_WORKSPACE_BYTES = 32 << 20

# How many algorithms the heuristic is asked for; it gave eight for each of the products above.
_MOST_ALGORITHMS = 12

# Each algorithm runs for so long in a round, and half as long before: where power is the limit, the clock has to fall
# to what the algorithm's own power allows, or the thirstiest would be chosen. After the first round only those go on
# that are within this factor of its best, and the heuristic's own choice. 11 products of a block take 18 s.
_FIRST_ROUND_MS = 25.0
_FINALIST_FACTOR = 1.04
_ROUNDS = 3
_ROUND_MS = 50.0

# The heuristic's own choice stays unless another takes this much less time, by the median of its rounds: rounds differ
# by up to 3 % as the clock changes, and one of eighty was slower by a fifth.
_LEAST_GAIN = 0.015

# The norm of the difference from torch's result, over the norm of that: bfloat16 rounds each number by up to 2^-9.
_TOLERANCE = 2**-7

_DATA_TYPES = {torch.float16: 2, torch.bfloat16: 14}
_COMPUTE_32F, _SCALE_32F = 68, 0
_TRANSPOSE_A, _TRANSPOSE_B = 3, 4
_MAX_WORKSPACE, _REDUCTIONS = 1, 3
# Partial sums stay in float32, and are added up in one order.
_IN_FLOAT32 = 2


@dataclass(frozen=True)
class MatrixLayout:
    """A matrix as cuBLASLt sees it, in column-major order."""

    transposed: bool  # Whether it is to be transposed.
    rows: int  # In memory, before that.
    columns: int
    column_stride: int  # Elements from one column to the next.


def matrix_layout(matrix: Tensor) -> MatrixLayout | None:
    """Describe the transpose of ``matrix`` (R, C), of which rows or columns are contiguous; None if neither are."""
    rows, columns = matrix.shape
    if matrix.stride(1) == 1 and matrix.stride(0) >= columns:
        return MatrixLayout(transposed=False, rows=columns, columns=rows, column_stride=matrix.stride(0))
    if matrix.stride(0) == 1 and matrix.stride(1) >= rows:
        return MatrixLayout(transposed=True, rows=rows, columns=columns, column_stride=matrix.stride(1))
    return None


@dataclass(frozen=True)
class ProductShape:
    """A product that an algorithm is chosen for, column-major: ``result' = b' a'``, plus an addend if it ``adds``."""

    a: MatrixLayout
    b: MatrixLayout
    dtype: torch.dtype
    adds: bool
    device: int


def product(a: Tensor, b: Tensor, add: Tensor | None = None, *, in_place: bool = False) -> Tensor:
    """Compute ``a @ b``, or ``add + a @ b``, summed in float32.

    Large products of half precision on a GPU take the algorithm that was fastest when it was measured, at the first
    such product of the process; others are torch's. Processes may choose differently, so that their results differ by
    rounding, except under ``torch.use_deterministic_algorithms``, where all are torch's. Neither differentiable nor an
    operator: for forward and backward passes that are written out.

    Args:
        a: (M, K).
        b: (K, N), of the same dtype.
        add: (M, N), contiguous, of the same dtype.
        in_place: write the result to ``add``.

    Returns:
        (M, N), contiguous; ``add`` if ``in_place``.
    """
    run = _algorithm_for(a, b, add)
    if run is None:
        return add.addmm_(a, b) if add is not None and in_place else _with_torch(a, b, add)
    result = add if add is not None and in_place else a.new_empty(a.shape[0], b.shape[1])
    run(a, b, add, result)
    return result


def _with_torch(a: Tensor, b: Tensor, add: Tensor | None) -> Tensor:
    return a @ b if add is None else torch.addmm(add, a, b)


# Computes a product on the current stream: of a, b, addend, result.
_Run = Callable[[Tensor, Tensor, Tensor | None, Tensor], None]

_runs: dict[ProductShape, _Run | None] = {}


def _algorithm_for(a: Tensor, b: Tensor, add: Tensor | None) -> _Run | None:
    """Return the algorithm that is fastest for this product, measured if it is the first; None: torch computes it."""
    # Compilers and dispatch modes can see torch's operators, but no call of cuBLASLt.
    if not a.is_cuda or a.dtype not in _DATA_TYPES or b.dtype != a.dtype or needs_operators(a):
        return None
    is_large = a.shape[0] * a.shape[1] * b.shape[1] >= LEAST_MULTIPLY_ADDS
    is_aligned = all(tensor is None or tensor.data_ptr() % _ALIGNMENT_BYTES == 0 for tensor in (a, b, add))
    # By times, two processes may choose two algorithms, whose results differ by rounding.
    if not is_large or not is_aligned or torch.are_deterministic_algorithms_enabled():
        return None
    layout_a, layout_b = matrix_layout(a), matrix_layout(b)
    if layout_a is None or layout_b is None or (add is not None and not add.is_contiguous()):
        return None
    shape = ProductShape(layout_a, layout_b, a.dtype, adds=add is not None, device=a.device.index)
    if shape not in _runs:
        if torch.cuda.graphs.is_current_stream_capturing():  # A capture cannot wait for measurements.
            return None
        _runs[shape] = _fastest(shape, a, b, add)
    return _runs[shape]


def _fastest(shape: ProductShape, a: Tensor, b: Tensor, add: Tensor | None) -> _Run | None:
    """Return the fastest of the algorithms whose result is torch's but for rounding; None if there is none."""
    library = _loaded_cublaslt(shape.device)
    if library is None:
        return None
    expected = _with_torch(a, b, add)
    result = torch.empty_like(expected)
    # The heuristic's own choice comes first, here and among the finalists.
    runs = [run for run in library.algorithms(shape) if _is_right(run, a, b, add, result, expected)]
    del expected
    if not runs:
        return None

    def time_ms(number: int, round_ms: float) -> float:
        return _time_ms(functools.partial(runs[number], a, b, add, result), round_ms)

    time_ms(0, _FIRST_ROUND_MS)  # Warms the GPU up.
    first_ms = [time_ms(number, _FIRST_ROUND_MS) for number in range(len(runs))]
    limit_ms = _FINALIST_FACTOR * min(first_ms)
    finalists = [number for number, duration_ms in enumerate(first_ms) if number == 0 or duration_ms <= limit_ms]
    rounds = [[time_ms(number, _ROUND_MS) for number in finalists] for _ in range(_ROUNDS)]
    medians = [statistics.median(times) for times in zip(*rounds, strict=True)]
    best = min(medians)
    return runs[finalists[medians.index(best)] if best < (1 - _LEAST_GAIN) * medians[0] else 0]


def _is_right(run: _Run, a: Tensor, b: Tensor, add: Tensor | None, result: Tensor, expected: Tensor) -> bool:
    """Return whether an algorithm runs, and its result, written to ``result``, is torch's but for rounding."""
    try:
        run(a, b, add, result.fill_(torch.nan))
    except RuntimeError:
        return False
    error_norm, norm = (
        torch.linalg.vector_norm(tensor, dtype=torch.float32) for tensor in (result.sub_(expected), expected)
    )
    return bool(error_norm <= _TOLERANCE * norm)


def _time_ms(run: Callable[[], None], round_ms: float) -> float:
    """Return the mean ms of a call over a round: so many calls as take ``round_ms``, after half as many to warm up."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def time_ms(calls: int) -> float:
        begin.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / calls

    run()
    calls = math.ceil(round_ms / max(time_ms(1), 0.01))  # A call that seems to take no time would make a round endless.
    time_ms(math.ceil(calls / 2))
    return time_ms(calls)


class _Algorithm(ctypes.Structure):
    """``cublasLtMatmulHeuristicResult_t``."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class _CublasLt:
    """The library that torch has loaded."""

    def __init__(self, library: ctypes.CDLL):
        self._library = library
        self._handle = ctypes.c_void_p()
        self._call("Create", ctypes.byref(self._handle))
        # One for each stream: products on two streams may run at the same time.
        self._workspaces: dict[tuple[int, int], Tensor] = {}

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, f"cublasLt{name}")(*arguments)
        if status:
            raise RuntimeError(f"cublasLt{name}: status {status}")

    def algorithms(self, shape: ProductShape) -> list[_Run]:
        """List the heuristic's algorithms, its own choice first; none if it knows none."""
        description, preference = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("MatmulDescCreate", ctypes.byref(description), _COMPUTE_32F, _SCALE_32F)
        # Column-major, the product is transposed, b' a': so the first operand is b.
        for attribute, matrix in ((_TRANSPOSE_A, shape.b), (_TRANSPOSE_B, shape.a)):
            self._set("MatmulDescSetAttribute", description, attribute, ctypes.c_int(matrix.transposed))
        self._call("MatmulPreferenceCreate", ctypes.byref(preference))
        self._set("MatmulPreferenceSetAttribute", preference, _MAX_WORKSPACE, ctypes.c_uint64(_WORKSPACE_BYTES))
        self._set("MatmulPreferenceSetAttribute", preference, _REDUCTIONS, ctypes.c_uint32(_IN_FLOAT32))  # Of split-K.
        rows = shape.b.columns if shape.b.transposed else shape.b.rows
        columns = shape.a.rows if shape.a.transposed else shape.a.columns
        result = MatrixLayout(transposed=False, rows=rows, columns=columns, column_stride=rows)
        # The addend is laid out as the result is.
        layouts = [self._layout(shape.dtype, matrix) for matrix in (shape.b, shape.a, result, result)]
        algorithms, count = (_Algorithm * _MOST_ALGORITHMS)(), ctypes.c_int()
        try:
            self._call(
                "MatmulAlgoGetHeuristic", self._handle, description, *layouts,
                preference, _MOST_ALGORITHMS, algorithms, ctypes.byref(count),
            )  # fmt: skip
        except RuntimeError:  # It knows none.
            return []
        return [
            functools.partial(self._run, description, layouts, float(shape.adds), algorithms[index].algorithm)
            for index in range(count.value)
        ]

    def _run(
        self, product_description: Any, layouts: Any, beta: float, algorithm: Any, a: Tensor, b: Tensor,
        add: Tensor | None, result: Tensor,
    ) -> None:  # fmt: skip
        """Launch an algorithm for ``a @ b + beta * add``: column-major, where all are transposed and b comes first."""
        stream = torch.cuda.current_stream(a.device).cuda_stream
        key = a.device.index, stream
        if key not in self._workspaces:
            self._workspaces[key] = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=a.device)
        layout_b, layout_a, layout_addend, layout_result = layouts
        addend = result if add is None else add  # Not read where beta is 0.
        with torch.cuda.device_of(a):
            self._call(
                "Matmul", self._handle, product_description, ctypes.byref(ctypes.c_float(1)),
                _address(b), layout_b, _address(a), layout_a, ctypes.byref(ctypes.c_float(beta)),
                _address(addend), layout_addend, _address(result), layout_result, algorithm,
                _address(self._workspaces[key]), ctypes.c_size_t(_WORKSPACE_BYTES), ctypes.c_void_p(stream),
            )  # fmt: skip

    def _set(self, name: str, descriptor: Any, attribute: int, value: Any) -> None:
        self._call(name, descriptor, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value)))

    def _layout(self, dtype: torch.dtype, matrix: MatrixLayout) -> ctypes.c_void_p:
        layout = ctypes.c_void_p()
        self._call(
            "MatrixLayoutCreate", ctypes.byref(layout), _DATA_TYPES[dtype],
            ctypes.c_uint64(matrix.rows), ctypes.c_uint64(matrix.columns), ctypes.c_int64(matrix.column_stride),
        )  # fmt: skip
        return layout


def _address(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


@functools.cache
def _loaded_cublaslt(device: int) -> _CublasLt | None:
    """Return cuBLASLt for products on this GPU; None where torch has no cuBLASLt, or one that cannot be called."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    torch.cuda.current_blas_handle()  # Makes torch load cuBLAS, and with it cuBLASLt.
    paths = {line.split()[-1] for line in maps.read_text().splitlines() if "libcublasLt.so" in line}
    try:
        with torch.cuda.device(device):  # A handle belongs to the current device.
            return _CublasLt(ctypes.CDLL(min(paths))) if paths else None  # Of several, in every process the same one.
    except (OSError, RuntimeError, AttributeError):
        return None
