"""Train a small model on several processes, with gradients averaged while the backward pass computes.

    torchrun --nproc-per-node 2 train_ddp.py

On GPUs each process takes one and NCCL communicates; without GPUs Gloo does.
"""

import os

import torch
import torch.distributed as dist
from torch import nn

from cs336sys.parallel.ddp import BucketedDDP


def main(steps: int = 20) -> None:
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    model = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 8)).to(device)
    # Weights of rank 0 are sent to the others; gradients travel in buckets of about 1 MB.
    parallel = BucketedDDP(model, bucket_size_mb=1.0)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)

    # Every rank draws the same 64 examples and trains on its own part of them.
    torch.manual_seed(0)
    inputs, targets = torch.randn(64, 32), torch.randint(8, (64,))
    own = slice(rank * 64 // world_size, (rank + 1) * 64 // world_size)
    inputs, targets = inputs[own].to(device), targets[own].to(device)

    for step in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(parallel(inputs), targets)
        loss.backward()
        # Wait for the averages before anything reads gradients: clipping, or the optimizer.
        parallel.finish_gradient_synchronization()
        optimizer.step()

        mean = loss.detach()
        dist.all_reduce(mean)
        if rank == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss {mean.item() / world_size:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
