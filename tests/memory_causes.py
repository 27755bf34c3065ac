"""Training runs with one mistake each, and without any, on fake tensors: what ``memprof --from`` must name."""

import random

import torch
import torch.nn.functional as F
from cuda_snapshots import MIB, fake_cuda
from torch import nn
from torch.utils.checkpoint import checkpoint

from cs336sys.allocations.diagnosis import diagnose_memory
from cs336sys.allocations.dump import parse_dump

CAUSES = {
    "fragmentation": "fragmentation",
    "list": "leak",
    "logits": "fp32 logits",
    "graph": "graph kept",
    "twice": "optimizer state twice",
    "rank": "longer batch",
}


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width, vocabulary, layers, checkpoints=False):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.checkpoints = checkpoints

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return self.head(x)


def run(cause, seed, *, batch_factor=1, capacity=80 * 1024 * MIB, stacks="python"):
    """The allocator after training with this mistake, or "none"."""
    draw = random.Random(f"{cause} {seed}")
    width, layers = draw.choice((256, 384, 512)), draw.randint(2, 4)
    vocabulary = draw.choice((1000, 2000)) if cause != "logits" else draw.choice((32000, 50257, 64000))
    batch, context = draw.choice((2, 4)) * batch_factor, draw.choice((256, 320, 512))
    optimizers = (torch.optim.AdamW, torch.optim.Adam)
    if cause not in ("twice",):
        optimizers += (lambda parameters: torch.optim.SGD(parameters, momentum=0.9),)
    make = draw.choice(optimizers)
    checkpoints = cause != "logits" and draw.random() < 0.3
    kept_output = draw.random() < 0.5
    passes = draw.choice((1, 2)) if cause == "none" else 1
    half = cause == "logits" or (cause == "none" and draw.random() < 0.3)
    with fake_cuda(capacity, stacks=stacks, expandable=cause == "none" and draw.random() < 0.3) as allocator:
        try:
            # A model cannot be converted on fake tensors.
            torch.set_default_dtype(torch.bfloat16 if half else torch.float32)
            net = Net(width, vocabulary, layers, checkpoints)
            torch.set_default_dtype(torch.float32)
            optimizer = make(net.parameters())
            second = make(net.parameters()) if cause == "twice" else None
            kept, losses = [], []
            for _ in range(draw.randint(5, 7)):
                for _ in range(passes):
                    tokens = torch.zeros(batch, context, dtype=torch.long)
                    output = net(tokens)
                    logits = output.float() if cause == "logits" and kept_output else output
                    if cause == "logits":
                        logits = logits.float()
                    loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
                    del logits
                    loss.backward()
                optimizer.step()
                if second is not None:
                    second.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
                if cause == "list":
                    kept.append(output if kept_output else net.embed(tokens).detach())
                elif cause == "graph":
                    kept.append(F.cross_entropy(net(tokens).flatten(0, 1), tokens.flatten()))
                elif cause == "none":
                    with torch.no_grad():
                        kept.append(F.cross_entropy(net(tokens).flatten(0, 1), tokens.flatten()))
                del output, loss
            if cause == "fragmentation":
                allocator.capacity = allocator.reserved + draw.randint(300, 500) * MIB
                pieces = []
                sizes = [draw.randint(7, 9) for _ in range(200)]
                while allocator.reserved + 20 * MIB <= allocator.capacity:
                    pieces.append(torch.empty(sizes.pop() * MIB, dtype=torch.uint8))
                del pieces[::2]
                torch.empty(draw.randint(50, 80) * MIB, dtype=torch.uint8)
            if cause == "too large":
                allocator.capacity = allocator.reserved + 10 * MIB
                net(torch.zeros(1024 * batch, context, dtype=torch.long))
        finally:
            allocator.stop()
    return allocator


def diagnoses(cause, seed, **settings):
    """One diagnosis, or of ``rank`` three."""
    if cause == "rank":
        runs = [run(cause, seed), run(cause, seed, batch_factor=2 if seed % 2 else 3), run(cause, seed)]
    else:
        runs = [run(cause, seed, **settings)]
    return [diagnose_memory(f"rank{i}.pickle", parse_dump(one.snapshot())[0]) for i, one in enumerate(runs)]
