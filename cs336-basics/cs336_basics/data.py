"""Random batches of a tokenised text."""

import numpy as np
import torch
from torch import Tensor


def get_batch(
    dataset: np.ndarray, batch_size: int, context_length: int, device: str | torch.device
) -> tuple[Tensor, Tensor]:
    """Windows of ``dataset`` at uniformly random starts, and the same windows one token later: inputs and targets.

    Only the windows are read, so ``dataset`` may be a memory-mapped file larger than memory. The starts come from
    PyTorch's CPU generator whatever the device. To a GPU the copy is asynchronous, out of pinned memory.

    Args:
        dataset: token ids, (num_tokens,), any integer dtype.
        batch_size: number of windows.
        context_length: tokens of a window.
        device: where the batch goes.

    Returns:
        Inputs and targets, each (batch_size, context_length), int64, on ``device``.

    Raises:
        ValueError: the dataset does not hold one window and the token after it.
    """
    if len(dataset) <= context_length:
        raise ValueError(
            f"the dataset has {len(dataset)} tokens, but context_length {context_length} needs at least "
            f"{context_length + 1}: a window and the token after it"
        )
    starts = torch.randint(len(dataset) - context_length, (batch_size,), device="cpu").numpy()
    tokens = dataset[starts[:, None] + np.arange(context_length + 1)].astype(np.int64)
    inputs, targets = (torch.from_numpy(part.copy()) for part in (tokens[:, :-1], tokens[:, 1:]))
    if torch.device(device).type == "cuda":
        inputs, targets = inputs.pin_memory(), targets.pin_memory()
    return inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)
