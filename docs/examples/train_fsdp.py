"""Train with parameters, gradients and optimizer state sharded over processes, save a checkpoint and load it again.

    torchrun --nproc-per-node 2 train_fsdp.py

The checkpoint may be loaded by any number of processes.
"""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn

from cs336sys.parallel.fsdp import FSDP


def build() -> nn.Module:
    return nn.Sequential(nn.Embedding(100, 64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 100))


def main(steps: int = 20) -> None:
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank = dist.get_rank()

    # Each rank keeps its slice of every matrix, its gradient and its moments; whole layers exist while they compute.
    sharded = FSDP(build().to(device))
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-2)

    torch.manual_seed(rank)
    tokens = torch.randint(100, (16, 33), device=device)
    for step in range(steps):
        optimizer.zero_grad()
        logits = sharded(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        sharded.finish_gradient_synchronization()
        # A slice's norm is not the gradient's: the module sums over ranks.
        sharded.clip_grad_norm_(1.0)
        optimizer.step()
        if rank == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss of rank 0 {loss.item():.4f}")

    # Every rank takes part in gathering; rank 0 writes plain tensors that any program can read.
    whole = sharded.gather_full_params()
    if rank == 0:
        file = os.path.join(tempfile.mkdtemp(), "weights.pt")
        torch.save(whole, file)
        alone = build()
        alone.load_state_dict(torch.load(file, weights_only=True))
        print(f"saved and loaded {sum(p.numel() for p in alone.parameters()):,} parameters")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
