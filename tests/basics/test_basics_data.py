"""Batches: what windows they hold, where from, and on which device."""

import tomllib
from pathlib import Path

import cs336_basics
import numpy as np
import pytest
import torch
from cs336_basics.data import get_batch

PROJECT = Path(__file__).parents[2] / "cs336-basics" / "pyproject.toml"


def test_targets_are_the_inputs_one_token_later():
    inputs, targets = get_batch(np.arange(100), batch_size=6, context_length=9, device="cpu")
    assert inputs.shape == targets.shape == (6, 9)
    assert inputs.dtype == targets.dtype == torch.int64
    # view(-1) in a training loop needs both contiguous.
    assert inputs.is_contiguous()
    assert targets.is_contiguous()
    assert torch.equal(inputs, inputs[:, :1] + torch.arange(9))
    assert torch.equal(targets, inputs + 1)


def test_every_window_is_drawn_about_equally_often():
    inputs, targets = get_batch(np.arange(10), batch_size=6000, context_length=4, device="cpu")
    counts = inputs[:, 0].bincount()
    assert len(counts) == 6
    assert counts.min() > 850
    assert targets.max() == 9


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.uint32])
def test_only_the_windows_of_a_memory_mapped_file_are_read(tmp_path, dtype):
    path = tmp_path / "tokens.bin"
    np.arange(60_000).astype(dtype).tofile(path)
    reads = []

    class Watched(np.memmap):
        def __getitem__(self, index):
            out = np.asarray(super().__getitem__(index))
            reads.append(out.size)
            return out

    dataset = Watched(path, dtype=dtype, mode="r")
    inputs, targets = get_batch(dataset, batch_size=4, context_length=16, device="cpu")
    assert sum(reads) == 4 * 17
    assert torch.equal(targets, inputs[:, :1] + torch.arange(1, 17))
    assert inputs.max() > 32_768  # past the range of int16


def test_dataset_without_a_token_after_the_window_is_refused():
    get_batch(np.arange(9), batch_size=1, context_length=8, device="cpu")
    with pytest.raises(ValueError, match="8 tokens, but context_length 8 needs at least 9"):
        get_batch(np.arange(8), batch_size=1, context_length=8, device="cpu")


def test_ambient_device_does_not_move_the_starts():
    with torch.device("meta"):
        inputs, _ = get_batch(np.arange(100), batch_size=2, context_length=4, device="cpu")
    assert inputs.device.type == "cpu"


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda", torch.device("cuda", 0)])
def test_batch_goes_to_the_gpu(device):
    inputs, targets = get_batch(np.arange(100), batch_size=3, context_length=5, device=device)
    assert inputs.is_cuda
    assert targets.is_cuda
    assert torch.equal(targets, inputs + 1)


def test_version_is_that_of_the_package():
    assert cs336_basics.__version__ == tomllib.loads(PROJECT.read_text())["project"]["version"]
