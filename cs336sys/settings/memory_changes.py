"""Changes that make a training step hold less memory: their settings, costs, options and lines of PyTorch. No torch.

A plan is some of them, at most one for each setting. Prices order plans: percent of FLOPs that are computed again, and
conventions: changes that keep all numbers come first, then recomputation, then other rounding, then more GPUs.
"""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from cs336sys.accounting.checkpointing import recomputed_flops
from cs336sys.accounting.flops import model_flops
from cs336sys.accounting.sharding.step import ShardedStep, predicted_sent_bytes, rank_peak
from cs336sys.errors import UsageError
from cs336sys.settings.profiling import MemoryWorkload
from cs336sys.settings.sizes import SIZES
from cs336sys.settings.training import OPTIMIZERS, UserCode, Workload


@dataclass(frozen=True)
class SettingChange:
    """One setting with another value.

    Attributes:
        setting, value: of :class:`MemoryWorkload` or its workload; ``ranks`` for more GPUs.
        option: what our commands take.
        pytorch: the same in a training script.
        cost: for people.
        price: by which plans are ordered, the cheapest first.
    """

    setting: str
    value: str | int
    option: str
    pytorch: str
    cost: str
    price: float


def possible_changes(workload: MemoryWorkload) -> list[SettingChange]:
    """List the changes that a workload has not made yet, by setting; on a CPU without those that need a GPU."""
    training = workload.training
    on_gpu = training.device != "cpu"
    has_moments = training.updates_parameters and training.optimizer in OPTIMIZERS
    changes: list[SettingChange] = []
    if training.updates_parameters and training.is_default("update") and not training.uses_graphs:  # Else refused.
        changes += _micro_batches(workload)
    if training.is_ours and training.keeps_scores:
        changes.append(_SDPA)
    if on_gpu and training.is_ours and not training.fused_kernels and training.updates_parameters:
        changes.append(_FUSED_KERNELS)
    if training.has_backward and workload.checkpointing == "none" and not training.is_compiled_whole:
        changes += _checkpoints(training)
    if not training.is_half:
        changes.append(_BF16)
    if on_gpu and has_moments and training.keeps_fp32_state:
        changes.append(_BF16_STATE)
    # Formulas predict ranks of our model. Those of another share an optimizer's moments, which a user's may not have.
    can_predict_ranks = training.memory_is_known if training.is_ours else has_moments
    # Gloo's ranks hold copies of the gradients that they send, which a GPU's do not.
    if on_gpu and training.updates_parameters and can_predict_ranks:
        changes += _rank_changes(workload)
    return changes


_SDPA = SettingChange(
    "attention", "sdpa", "--attention sdpa",
    "torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)",
    "none: other kernels for the same result", 0.2,
)  # fmt: skip
_FUSED_KERNELS = SettingChange(
    "kernels", "fused", "--kernels fused",
    "loss = cs336sys.kernels.linear_cross_entropy.linear_cross_entropy(hidden, head.weight, targets)",
    "none: fused kernels; the loss holds no logits", 0.3,
)  # fmt: skip
_BF16 = SettingChange(
    "precision", "bf16", "--precision bf16",
    'with torch.autocast("cuda", torch.bfloat16): loss = compute_loss(model, batch)',
    "other rounding", 100,
)  # fmt: skip
_BF16_STATE = SettingChange(
    "state_dtype", "bf16", "--optimizer adamw --state-dtype bf16",
    'optimizer = cs336sys.kernels.adamw.AdamW(model.parameters(), state_dtype="bf16")',
    "other rounding of the moments", 150,
)  # fmt: skip


def _micro_batches(workload: MemoryWorkload) -> Iterator[SettingChange]:
    """Yield the numbers of micro-batches that divide the batch and are more than the workload has."""
    size = workload.training.size.batch_size
    for count in (2, 4, 8, 16, 32, 64):
        if count > workload.micro_batches and size % count == 0:
            yield SettingChange(
                "micro_batches", count, f"--micro-batches {count}",
                f"for part in batch.chunk({count}): (compute_loss(model, part) / {count}).backward()  "
                "# then optimizer.step()",
                f"{count} passes of {size // count} sequences: less work for each launch",
                price=count.bit_length() / 10,  # More with each doubling, but less than 1 % of FLOPs.
            )  # fmt: skip


def _checkpoints(training: Workload) -> Iterator[SettingChange]:
    """Yield the checkpointing strategies that a model can have, each with the FLOPs that it computes again."""
    every_block = "x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)  # for each block"
    if not training.is_ours:
        percent = 100 / 3  # They compute at most the forward pass again, a third of FLOPs: we know no more.
        cost = f"up to {percent:.0f} % of FLOPs again"
        yield SettingChange("checkpointing", "block", "--checkpoint block", every_block, cost, percent)
        return
    blocks = training.size.num_layers
    code = {"block": every_block}
    for count in (2, 3, 4, 6, 8):
        if count < blocks and blocks % count == 0:
            group = f"x = checkpoint(torch.nn.Sequential(*group), x, use_reentrant=False)  # groups of {count} blocks"
            code[f"every={count}"] = group
    if not training.fused_kernels and not training.is_compiled:  # MemoryWorkload refuses sublayers of such blocks.
        sublayers = {"attention": "attention", "ffn": "feed-forward layer", "sublayer": "attention, feed-forward layer"}
        for strategy, part in sublayers.items():
            code[strategy] = f"x = x + checkpoint(layer, x, use_reentrant=False)  # {part} of each block, with its norm"
    causal = not training.keeps_scores  # With all scores in memory, hidden pairs are computed, too.
    for strategy, line in code.items():
        recomputed = recomputed_flops(training.size, strategy, causal=causal)
        percent = 100 * recomputed / model_flops(training.size, causal=causal)
        cost = f"{percent:.1f} % of FLOPs again"
        yield SettingChange("checkpointing", strategy, f"--checkpoint {strategy}", line, cost, percent)


def _rank_changes(workload: MemoryWorkload) -> Iterator[SettingChange]:
    """Yield the numbers of ranks that share the batch equally, with each strategy that shards this model."""
    training = workload.training
    if not _can_predict_shards(training):
        return
    # The memory of FSDP is predicted for our model alone.
    for ranks, strategy in product((2, 4, 8), ("optimizer", "fsdp") if training.is_ours else ("optimizer",)):
        if training.size.batch_size % ranks:
            continue
        cost = f"{ranks} GPUs"
        if training.is_ours:
            sent = predicted_sent_bytes(_sharded_step(workload, strategy, ranks))
            cost += f", {sent / 2**30:.3g} GiB sent by each"
        code = (
            "optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW)"
            if strategy == "optimizer"
            else "torch.distributed.fsdp.fully_shard(block)  # each block, then the model"
        )
        yield SettingChange(
            "ranks", f"{strategy} x {ranks}", f"shard --world-size {ranks} --strategy {strategy}", code,
            cost, price=1000 * ranks + (strategy == "fsdp"),  # After changes on one GPU; FSDP sends more.
        )  # fmt: skip


def number_of_ranks(ranks: SettingChange) -> int:
    """Return how many GPUs a change to ``ranks`` takes: 4 for "fsdp x 4"."""
    return int(str(ranks.value).partition(" x ")[2])


def _can_predict_shards(training: Workload) -> bool:
    """Return whether a :class:`ShardedStep`, which has no kernels and no state dtype, describes this training."""
    return not training.fused_kernels and training.keeps_fp32_state


def _sharded_step(workload: MemoryWorkload, strategy: str, ranks: int) -> ShardedStep:
    """Describe the step that a strategy shares among so many ranks, for its predictions."""
    training = workload.training
    return ShardedStep(
        strategy,
        training.size,
        world_size=ranks,
        precision=training.precision,
        attention=training.attention,
        checkpointing=workload.checkpointing,
    )


def sharded_bytes(workload: MemoryWorkload, ranks: SettingChange) -> int | None:
    """Predict the peak of one of several ranks, None where formulas do not know."""
    training = workload.training
    if workload.micro_batches > 1 or not _can_predict_shards(training):  # A ShardedStep has no micro-batches.
        return None
    strategy = str(ranks.value).partition(" x ")[0]  # "fsdp" of "fsdp x 4".
    try:
        return rank_peak(_sharded_step(workload, strategy, number_of_ranks(ranks))).total
    except UsageError:
        return None


def changed(workload: MemoryWorkload, plan: Sequence[SettingChange]) -> MemoryWorkload | None:
    """Return the workload with these changes, as one GPU would run it; None where they do not go together."""
    settings: dict[str, Any] = {change.setting: change.value for change in plan if change.setting != "ranks"}
    memory_settings = {name: settings.pop(name) for name in ("checkpointing", "micro_batches") if name in settings}
    if "state_dtype" in settings:
        settings["optimizer"] = "adamw"  # No other keeps its state in bf16.
    try:
        return replace(workload, training=replace(workload.training, **settings), **memory_settings)
    except UsageError:
        return None


def plans(changes: Sequence[SettingChange]) -> list[tuple[SettingChange, ...]]:
    """Return every plan but the empty one, the cheapest first: at most one change for each setting."""
    settings = list(dict.fromkeys(change.setting for change in changes))
    # None leaves the setting as it is.
    choices = [[None, *(change for change in changes if change.setting == setting)] for setting in settings]
    combinations = [tuple(change for change in chosen if change is not None) for chosen in product(*choices)]
    return sorted(filter(None, combinations), key=lambda plan: (sum(change.price for change in plan), len(plan)))


# Settings without an option, or on which a step's memory does not depend.
_NOT_IN_COMMANDS = ("code_digest", "warmup", "steps", "tf32", "synchronize", "trace", "snapshot")


def command_line(workload: MemoryWorkload) -> str:
    """Return the ``memprof`` command that measures a workload, without options at their defaults."""
    # A size with other widths is named after these: say how it differs from tiny.
    size = SIZES.get(workload.training.size.name, SIZES["tiny"])
    defaults = MemoryWorkload(Workload(size, precision=size.precision)).configuration() | {"size": None}
    values = workload.configuration() | {"size": size.name}
    arguments = [
        text
        for name, setting in (UserCode.settings() | MemoryWorkload.settings()).items()
        if name not in _NOT_IN_COMMANDS and name in values and values[name] != defaults.get(name)
        for text in (setting.flag, str(values[name]))
    ]
    return shlex.join(["cs336sys", "memprof", *arguments])
