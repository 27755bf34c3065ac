"""Name the changes that make a training step smaller or faster, and write each as lines of PyTorch. No torch.

``tune`` and plans of ``memprof`` print them for people whose training loop is their own.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Change:
    """One change to a training script.

    Attributes:
        name: for tables.
        lines: PyTorch code, with ``model``, ``block``, ``optimizer``, ``loss`` and the like as the script's own names.
        cost: what it costs, or an empty text.
    """

    name: str
    lines: tuple[str, ...]
    cost: str = ""


AUTOCAST = Change(
    "bf16 autocast",
    ('with torch.autocast("cuda", dtype=torch.bfloat16):', "    loss = loss_function(model(inputs), targets)"),
)
COMPILE_BLOCKS = Change(
    "compile each block", ("for block in model.layers:", "    block.compile()"), "minutes of start-up"
)
COMPILE_MODEL = Change("compile the model", ("model = torch.compile(model)",), "minutes of start-up")
SDPA = Change(
    "torch's attention",
    ("output = F.scaled_dot_product_attention(q, k, v, is_causal=True)",),
)
FLASH = Change(
    "FlashAttention kernels",
    (
        "from cs336sys.kernels.attention import flash_attention",
        "output = flash_attention(q, k, v, is_causal=True)",
    ),
)
FUSED_KERNELS = Change("fused kernels", ("from cs336sys.kernels.fuse import fuse", "fuse(model)"))
FUSED_ADAMW = Change("torch's fused AdamW", ("optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)",))
CUDA_GRAPH = Change(
    "CUDA graph",
    (
        "graph = torch.cuda.CUDAGraph()  # after a few steps of warm-up on a side stream",
        "with torch.cuda.graph(graph):",
        "    static_loss = loss_function(model(static_inputs), static_targets); static_loss.backward()",
        "static_inputs.copy_(inputs); static_targets.copy_(targets); graph.replay(); optimizer.step()",
    ),
    "fixed shapes; a pool of memory of its own",
)


def own_adamw(state_dtype: str) -> Change:
    """Return this project's AdamW, its moments in ``state_dtype``."""
    return Change(
        f"AdamW, {state_dtype} state",
        (
            "from cs336sys.kernels.adamw import AdamW",
            f'optimizer = AdamW(model.parameters(), lr=lr, state_dtype="{state_dtype}")',
        ),
        "" if state_dtype == "fp32" else "moments are rounded to bf16" if state_dtype == "bf16" else "",
    )


def checkpoint_blocks(every: int = 1) -> Change:
    """Return activation checkpointing around each block, or around groups of so many."""
    if every == 1:
        lines: tuple[str, ...] = (
            "from torch.utils.checkpoint import checkpoint",
            "for block in model.layers:",
            "    x = checkpoint(block, x, use_reentrant=False)",
        )
        return Change("checkpoint each block", lines, "one more forward pass of the blocks")
    lines = (
        "from torch.utils.checkpoint import checkpoint",
        f"for first in range(0, len(model.layers), {every}):",
        f"    group = nn.Sequential(*model.layers[first : first + {every}])",
        "    x = checkpoint(group, x, use_reentrant=False)",
    )
    return Change(f"checkpoint groups of {every} blocks", lines, "one more forward pass of the blocks")


def micro_batches(sequences: int, count: int) -> Change:
    """Return gradient accumulation over ``count`` micro-batches of ``sequences``."""
    lines = (
        f"for part, target in zip(inputs.split({sequences}), targets.split({sequences})):",
        f"    (loss_function(model(part), target) / {count}).backward()",
        "optimizer.step(); optimizer.zero_grad()",
    )
    return Change(f"{count} micro-batches of {sequences}", lines, "smaller products; gradients are held throughout")


def share_state(strategy: str, gradient_dtype: str = "fp32") -> Change:
    """Return a strategy of data parallel training, by its name in ``ddp`` or ``shard``."""
    if strategy == "fsdp":
        lines: tuple[str, ...] = (
            "from cs336sys.parallel.fsdp import FSDP",
            "model = FSDP(model, compute_dtype=torch.bfloat16)",
        )
        return Change("fully sharded", lines, "weights are gathered twice a step")
    if strategy in ("optimizer", "optimizer-flat"):
        flat = ", flat=True" if strategy == "optimizer-flat" else ""
        lines = (
            "from cs336sys.parallel.sharded_optimizer import ShardedOptimizer",
            f"optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW{flat}, lr=lr, fused=True)",
        )
        return Change("sharded optimizer", lines, "updated parameters are sent to all ranks")
    half = ", gradient_dtype=torch.bfloat16" if gradient_dtype == "bf16" else ""
    lines = (
        "from cs336sys.parallel.ddp import BucketedDDP",
        f'model = BucketedDDP(model, "block"{half})',
        "loss.backward(); model.finish_gradient_synchronization(); optimizer.step()",
    )
    return Change("data parallel in buckets", lines, "every rank holds all state")
