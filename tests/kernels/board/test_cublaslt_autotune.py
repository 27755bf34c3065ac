import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from cs336sys.board import cublaslt_autotune
from cs336sys.board.cublaslt_autotune import ProductShape, matrix_layout, product

ROWS, INNER, COLUMNS = 7, 5, 3


def laid_out(rows: int, columns: int, layout: str) -> torch.Tensor:
    """Numbers in a matrix that lies in memory by rows, by columns, or in wider rows."""
    if layout == "columns":
        return torch.randn(columns, rows).mT
    if layout == "wider rows":
        return torch.randn(rows, columns + 2)[:, 1:-1]
    return torch.randn(rows, columns)


def as_cublas_reads(matrix: torch.Tensor) -> torch.Tensor:
    """What column-major order makes of the memory of ``matrix``, transposed if its description says so."""
    described = matrix_layout(matrix)
    seen = matrix.as_strided((described.rows, described.columns), (1, described.column_stride))
    return seen.mT if described.transposed else seen


@pytest.mark.parametrize(("of_a", "of_b"), list(itertools.product(["rows", "columns", "wider rows"], repeat=2)))
def test_operands_describe_the_transposed_product_in_column_major_order(of_a, of_b):
    a, b = laid_out(ROWS, INNER, of_a), laid_out(INNER, COLUMNS, of_b)
    transposed = as_cublas_reads(b) @ as_cublas_reads(a)
    torch.testing.assert_close(transposed.mT, a @ b)


def test_matrices_without_contiguous_rows_or_columns_have_no_description():
    assert matrix_layout(torch.randn(8, 8)[::2, ::2]) is None
    assert matrix_layout(torch.randn(4, 1).expand(4, 8)) is None


def algorithm(off: float):
    """What computes a product whose last row is off by a part of all of it, or refuses to if that is infinite."""

    def run(a, b, add, result):
        if math.isinf(off):
            raise RuntimeError("cublasLtMatmul: status 15")
        torch.mm(a, b, out=result)
        result[-1] += off * result.norm()

    return run


@pytest.mark.parametrize(
    ("times_ms", "off", "chosen", "order"),
    [
        # The first time is of a cold GPU, and would choose another.
        ([2.0, 1.0, 1.5], [0, 0, 0], 1, [0, 0, 1, 2, *3 * [0, 1]]),
        ([2.0, 1.98, 2.01], [0, 0, 0], 0, [0, 0, 1, 2, *3 * [0, 1, 2]]),
        ([2.0, 1.5, 1.0], [0, 0, 0.1], 1, [0, 0, 1, *3 * [0, 1]]),
        ([2.0, 1.0, 1.5], [0, math.inf, math.nan], 0, [0, 0, 0, 0, 0]),
        ([2.0], [0.1], None, []),
        ([], [], None, []),
    ],
    ids=["fastest", "its own choice within 1.5 %", "not what is wrong", "nor refuses", "none is right", "none"],
)
def test_fastest_algorithm_that_is_right_is_chosen_by_times_of_a_warm_gpu(times_ms, off, chosen, order, monkeypatch):
    runs = [algorithm(one) for one in off]
    seen: list[int] = []

    def time_ms(run, round_ms):
        seen.append(runs.index(run.func))
        # Something else has lengthened the first time of the algorithm that is chosen in its last rounds.
        lengthened = 2 if len(seen) == order.index(chosen, 1 + len(runs)) + 1 else 1
        return lengthened * times_ms[seen[-1]] if len(seen) > 1 else 0.1

    monkeypatch.setattr(
        cublaslt_autotune, "_loaded_cublaslt", lambda device: SimpleNamespace(algorithms=lambda shape: runs)
    )
    monkeypatch.setattr(cublaslt_autotune, "_time_ms", time_ms)
    a, b = torch.randn(ROWS, INNER), torch.randn(INNER, COLUMNS)
    shape = ProductShape(matrix_layout(a), matrix_layout(b), a.dtype, False, 0)
    found = cublaslt_autotune._fastest(shape, a, b, None)
    assert found is (None if chosen is None else runs[chosen])
    assert seen == order


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_every_algorithm_are_right(dtype, monkeypatch):
    monkeypatch.setattr(cublaslt_autotune, "LEAST_MULTIPLY_ADDS", 1)
    monkeypatch.setattr(cublaslt_autotune, "_FIRST_ROUND_MS", 0.5)
    monkeypatch.setattr(cublaslt_autotune, "_ROUND_MS", 0.5)
    for of_a, of_b, adds in itertools.product(["rows", "columns"], ["rows", "columns"], [False, True]):
        a, b, add = (
            laid_out(*shape).to("cuda", dtype) for shape in ((512, 384, of_a), (384, 256, of_b), (512, 256, "rows"))
        )
        expected = a.double() @ b.double() + (add.double() if adds else 0)
        shape = ProductShape(matrix_layout(a), matrix_layout(b), dtype, adds, a.device.index)
        runs = cublaslt_autotune._loaded_cublaslt(a.device.index).algorithms(shape)
        assert runs
        for run in runs:
            result = torch.full((512, 256), torch.nan, device="cuda", dtype=dtype)
            run(a, b, add if adds else None, result)
            assert (result.double() - expected).abs().max() < 0.01 * expected.abs().max()
        into = add.clone()
        found = product(a, b, into, in_place=True) if adds else product(a, b)
        assert not adds or found is into
        assert (found.double() - expected).abs().max() < 0.01 * expected.abs().max()
        assert any(shape.adds == adds and run is not None for shape, run in cublaslt_autotune._runs.items())
        # What must be the same in every process is left to torch.
        torch.use_deterministic_algorithms(True)
        try:
            assert cublaslt_autotune._algorithm_for(a, b, None) is None
        finally:
            torch.use_deterministic_algorithms(False)
