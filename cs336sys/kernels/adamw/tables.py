"""Tables on the device that describe tensors to the AdamW kernels, made anew only when tensors change."""

import itertools
import operator
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cs336sys.kernels.adamw import kernels

TRITON_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


class Variant(NamedTuple):
    """Properties that the parameters of one launch share, the first of ``kernels.UpdateConfig``."""

    gradient_dtype: tl.dtype
    bfloat16_moments: bool
    weights: int
    copy_dtype: tl.dtype | None


def tile_settings(variant: Variant) -> tuple[int, int]:
    """Return the elements of half a tile and the warps of a program.

    Shares of the copy rate on an H200, and bytes that a step moves of each of 0.94 B parameters: float32 0.98 (28
    bytes), with copies 0.97 (30), split 0.97 (26), bfloat16 states 0.99 (20), bfloat16 throughout 0.88 (14); torch's
    fused AdamW with float32 states 0.82. With halves of 1024 and four warps bfloat16 states reach 0.97 and bfloat16
    throughout 0.80: random bits take registers.
    """
    if kernels.INTERPRETED:
        return kernels.CHUNK // 2, 4  # A chunk in one turn of the kernel's loop.
    if variant.weights == kernels.BFLOAT16.value:
        return 256, 2
    return (512 if variant.bfloat16_moments else 1024), 4


class Update(NamedTuple):
    """One parameter's tensors, dense with the same strides, in fields that are called like ``kernels.COLUMNS``."""

    variant: Variant
    weight: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    other: Tensor | None
    step: Tensor
    number: int
    group: int

    def row(self) -> list[int]:
        """Return the values of ``kernels.COLUMNS``."""
        tensors = self.weight, self.gradient, self.exp_avg, self.exp_avg_sq, self.other
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        aligned = int(all(address % 16 == 0 for address in addresses))
        return [*addresses, self.step.data_ptr(), self.weight.numel(), self.number, self.group, aligned]


def is_capturing(device: torch.device) -> bool:
    """Return whether what is launched now becomes part of a CUDA graph."""
    return device.type == "cuda" and torch.cuda.graphs.is_current_stream_capturing()


class Uploader:
    """Copies of tables to the device that do not make the host wait, also as part of a CUDA graph.

    A graph copies from the same host memory at every replay (16 us of a step of 5 ms, ``small`` on an H200), so that
    memory stays as it is. Host memory cannot be pinned while a graph is captured, and device memory that is allocated
    then is overwritten by replays: so a spare buffer of each is kept for every size that was uploaded before.
    """

    def __init__(self) -> None:
        self._spares: dict[int, tuple[Tensor, Tensor]] = {}  # By the number of bytes: pinned, and on the device.
        self._captured: list[Tensor] = []

    def __call__(self, values: Tensor, device: torch.device) -> Tensor:
        """Return the values on the device, the same in all calls."""
        if device.type != "cuda":
            return values
        num_bytes = values.nbytes
        if not is_capturing(device):
            if num_bytes not in self._spares:  # For a capture that may follow.
                pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
                self._spares[num_bytes] = pinned, torch.empty_like(pinned, device=device, pin_memory=False)
            return values.pin_memory().to(device, non_blocking=True)
        if num_bytes not in self._spares:
            raise RuntimeError(
                "AdamW: parameters or settings have changed since the last step outside of a CUDA graph: take a step "
                "before the graph is captured, and between two captures"
            )
        pinned, on_device = (buffer.view(values.dtype).view(values.shape) for buffer in self._spares.pop(num_bytes))
        pinned.copy_(values)
        self._captured.append(pinned)  # Every replay copies from it.
        return on_device.copy_(pinned, non_blocking=True)


class Chunks:
    """The division of the parameters' elements among programs, and the results that kernels pass to each other.

    Args:
        sizes: variant and number of elements of each parameter, in the order of the launches.
    """

    def __init__(self, sizes: Sequence[tuple[Variant, int]], upload: Uploader, device: torch.device):
        counts = [triton.cdiv(num_elements, kernels.CHUNK) for _, num_elements in sizes]
        num_chunks = torch.tensor(counts)
        rows = torch.arange(len(sizes)).repeat_interleave(num_chunks)
        first_chunks = num_chunks.cumsum(0) - num_chunks
        total = sum(counts)
        # Of each chunk its parameter's row, and its place among that parameter's chunks.
        self.table = upload(torch.stack([rows, torch.arange(total) - first_chunks[rows]], dim=1).int(), device)
        # Variant, first chunk, number of chunks: one launch for the parameters of a variant, next to each other.
        self.launches: list[tuple[Variant, int, int]] = []
        first_chunk = 0
        variants = [variant for variant, _ in sizes]
        for variant, group in itertools.groupby(zip(variants, counts, strict=True), key=operator.itemgetter(0)):
            num_chunks_of_launch = sum(count for _, count in group)
            if num_chunks_of_launch:  # Empty parameters have no chunks.
                self.launches.append((variant, first_chunk, num_chunks_of_launch))
            first_chunk += num_chunks_of_launch
        self.sums_of_squares = torch.empty(total, dtype=torch.float32, device=device)
        self.factors = torch.empty((len(sizes), kernels.NUM_FACTORS.value), dtype=torch.float32, device=device)
        self.clip = torch.empty(2, dtype=torch.float32, device=device)  # The norm, and the factor that clips.


class GroupedParameter(NamedTuple):
    """A parameter with its place in the optimizer and its group's."""

    parameter: Tensor
    number: int
    group: int


class ParameterSet:
    """Parameters that are updated together, and the tables that describe their tensors to the kernels.

    Attributes:
        described_signature: of the tensors that the tables describe; None if these are to be described anew.
    """

    def __init__(self, members: Sequence[GroupedParameter]):
        self.members = members
        self.described_signature: list | None = None
        self._upload = Uploader()
        self._sizes: list[tuple[Variant, int]] = []
        self._chunks: Chunks | None = None
        self._rows = torch.empty(0)
        self._settings: list[list[float]] = []
        self._setting_table = torch.empty(0)
        self._captured: list = []

    def describe(self, updates: list[Update]) -> None:
        """Upload the table of the tensors of the next steps, those of one variant next to each other."""
        device = updates[0].weight.device
        variants = list(dict.fromkeys(update.variant for update in updates))
        updates = sorted(updates, key=lambda update: variants.index(update.variant))
        sizes = [(update.variant, update.weight.numel()) for update in updates]
        if self._chunks is None or sizes != self._sizes:
            self._chunks, self._sizes = Chunks(sizes, self._upload, device), sizes
        self._rows = self._upload(torch.tensor([update.row() for update in updates]), device)

    def step(self, settings: list[list[float | Tensor]], max_norm: float | None) -> Tensor:
        """Launch the kernels that update all parameters: norms if clipped, all factors, then updates by variant.

        Args:
            settings: ``kernels.SETTINGS`` of each group, of which learning rates may be tensors on the device.
            max_norm: of all gradients together.

        Returns:
            Two float32: the norm of the gradients and the factor that clipped them, if there is a ``max_norm``.
        """
        assert self._chunks is not None
        chunks, rows, setting_table = self._chunks, self._rows, self._upload_settings(settings)
        tables = rows, setting_table, chunks.factors, chunks.sums_of_squares, chunks.clip
        numbers = len(rows), len(chunks.sums_of_squares), 0.0 if max_norm is None else max_norm
        tiles = {"CHUNK": kernels.CHUNK, "TILE": kernels.CHUNK // 2}  # On a GPU 16 elements in each of 128 threads.
        constants = {"CLIPPED": max_norm is not None, "ROW_TILE": kernels.ROW_TILE, "SUM_TILE": kernels.SUM_TILE}
        with torch.cuda.device_of(setting_table):
            if max_norm is not None:
                for variant, first, count in chunks.launches:
                    kernels.adamw_norm_kernel[(count,)](
                        rows,
                        chunks.table,
                        chunks.sums_of_squares,
                        first,
                        GRADIENT_DTYPE=variant.gradient_dtype,
                        **tiles,
                    )
            kernels.adamw_prepare_kernel[(1,)](*tables, *numbers, **constants, num_warps=16)
            # Without fusion by the compiler: all variants must give the same bits.
            for variant, first, count in chunks.launches:
                half_tile, num_warps = tile_settings(variant)
                config = kernels.UpdateConfig(
                    *variant, clipped=max_norm is not None, chunk=kernels.CHUNK, half_tile=half_tile
                )
                kernels.adamw_update_kernel[(count,)](
                    rows, chunks.table, chunks.factors, chunks.clip, first,
                    CONFIG=config, num_warps=num_warps, enable_fp_fusion=False,
                )  # fmt: skip
        if is_capturing(rows.device):  # Replays of the graph use these tables.
            self._captured.append((chunks, rows, setting_table))
        return chunks.clip

    def _upload_settings(self, settings: list[list[float | Tensor]]) -> Tensor:
        """Return the settings on the device, (groups, ``kernels.SETTINGS``), uploaded only if numbers have changed."""
        numbers = [[0.0 if isinstance(value, Tensor) else float(value) for value in group] for group in settings]
        if numbers != self._settings:
            self._setting_table = self._upload(torch.tensor(numbers, dtype=torch.float64), self._rows.device)
            self._settings = numbers
        for group, values in enumerate(settings):
            for column, value in enumerate(values):
                if isinstance(value, Tensor):  # Its number, which the host does not know, may be another in each step.
                    self._setting_table[group, column].copy_(value.squeeze())
        return self._setting_table
