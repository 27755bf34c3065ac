"""What the tests of sharded training run on ranks."""

import functools
from dataclasses import replace

import torch

from cs336sys.commands.rank_training.communication import recorded_communication
from cs336sys.commands.rank_training.rank import build_recorded, verify_on_rank
from cs336sys.training.ranks import sharded_strategies
from cs336sys.training.ranks.step import ParallelStep

_RIGHT = sharded_strategies.fully_sharded


def verify_all(workloads):
    return [verify_on_rank(workload) for workload in workloads]


def scalers(workloads):
    """For each, the class of what scales the loss, if it does."""
    steps = [ParallelStep(workload, torch.device("cpu")) for workload in workloads]
    return [type(step.scaler).__name__ for step in steps if step.scaler.is_enabled()]


def observe_all(workloads):
    """For each, the memory at six moments and the bytes that a step sends."""
    observed, device = [], torch.device("cpu")
    for workload in workloads:
        step, memory, _ = build_recorded(functools.partial(ParallelStep, workload, device), device)
        with recorded_communication() as communications:
            step()
        sent = [communication.sent_bytes for communication in communications if not communication.is_flags]
        observed.append((memory, sum(sent)))
    return observed


def bytes_by_phase(workload):
    """What the second step sends in each of its phases, and what it has left under way."""
    step, sent = ParallelStep(workload, torch.device("cpu")), {}
    step()
    for name, run in step.phases.items():
        with recorded_communication() as communications:
            run()
        sent[name] = sum(communication.sent_bytes for communication in communications if not communication.is_flags)
    with recorded_communication() as after:
        step.replica.whole_parameters()
    return sent, sum(phase_bytes.sent_bytes for phase_bytes in after)


def break_fsdp() -> None:
    """From now on fsdp loses the gradients of the LM head's rows on this rank."""

    def prepare(*arguments):
        replica = _RIGHT(*arguments)

        def synchronize():
            replica.synchronize()
            replica.model.sharded_parameters["lm_head.weight"].shard.grad = None

        return replace(replica, synchronize=synchronize)

    sharded_strategies.fully_sharded = prepare


def repair() -> None:
    sharded_strategies.fully_sharded = _RIGHT
