"""What the tests run on ranks: training that is wrong in one way, and steps looked at from inside."""

import functools
import gc
import importlib
import os
import signal
import time
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fake_cuda_graph import OperatorRecorder
from torch.distributed import _functional_collectives as functional_collectives
from torch.utils._python_dispatch import TorchDispatchMode

from cs336sys.commands.rank_training.communication import communication_at_once, recorded_communication, run_alone
from cs336sys.commands.rank_training.measure import measure_parallel_training
from cs336sys.commands.rank_training.rank import build_recorded
from cs336sys.commands.rank_training.verification import verify_training
from cs336sys.parallel.collectives import all_gather_single, reduce_scatter_single
from cs336sys.parallel.context_parallel import attention
from cs336sys.parallel.ranks import launch
from cs336sys.parallel.tensor_parallel import layers, wrapper
from cs336sys.parity.weights import WeightDifference
from cs336sys.run.cells import Outcome
from cs336sys.training.ranks import step as step_module
from cs336sys.training.ranks import strategies, tensor_strategies
from cs336sys.training.ranks.step import ParallelStep

CPU = torch.device("cpu")

_RIGHT = strategies.replicated


def worst(differences) -> WeightDifference:
    return max(differences, key=lambda difference: difference.relative)


def largest(differences) -> float:
    return worst(differences).relative


def outcome_of(cell) -> Outcome:
    return measure_parallel_training(cell.configuration(), lambda stage: None)


def measured(cell) -> Outcome:
    outcome = outcome_of(cell)
    assert (outcome.status, outcome.reason) == ("ok", None), cell.strategy
    return outcome


def import_compiler() -> None:
    """Torch's, which most tests here import, while nothing lives that would have to be freed.

    Each cell looks for garbage up to ten times: among what the compiler consists of that took 0.1 s each time.
    """
    importlib.import_module("torch._dynamo")
    gc.collect()
    gc.freeze()


def break_overlap(how: str) -> None:
    """From now on strategy ``overlap`` is wrong on this rank."""
    strategies.replicated = _broken(how)


def repair() -> None:
    strategies.replicated = _RIGHT


def verify_broken(workload, how: str) -> WeightDifference:
    break_overlap(how)
    try:
        return verify_training(workload)
    finally:
        repair()


def verify_in_graphs(workload, how: str | None = None) -> WeightDifference:
    """The check of a step whose operators are recorded and replayed, as a CUDA graph's are."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(step_module, "recorder_of", lambda *_: OperatorRecorder())
        return verify_training(workload) if how is None else verify_broken(workload, how)


class _RunsAgain(OperatorRecorder):
    """Calls what it was to record: torch's ``fully_shard`` frees storages, which replays of operators would miss."""

    def record(self, run):
        return run


def captured_phases(workload) -> list[str]:
    """The names of the phases once the step is captured."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(step_module, "recorder_of", lambda *_: _RunsAgain())
        step = ParallelStep(workload, CPU)
        step.capture()
        return list(step.phases)


def gathers_left_by_phases(workload):
    """Units under way after each phase of FSDP, launched and to be captured, once the order of gathers is known."""
    left = []
    for in_graphs in (False, True):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(step_module, "recorder_of", lambda *_: OperatorRecorder())
            training = replace(workload.training, cuda_graph="on" if in_graphs else "off")
            step = ParallelStep(replace(workload, training=training), CPU)
            for _ in range(3):
                under_way = {}
                for name, run in step.phases.items():
                    run()
                    under_way[name] = [unit.name for unit in step.model.units if unit.is_under_way]
            left.append((under_way, [weight.detach().clone() for weight in step.model.parameters()]))
    (launched, weights), (captured, others) = left
    # An optimizer that counts on the device computes the bias correction there.
    return launched, captured, max(map(_largest_difference, weights, others))


def _largest_difference(first, second):
    return (first - second).abs().max().item()


def is_over_after_replays(workload):
    """Whether this rank's GPU had nothing left to do after each of some replayed steps."""
    step = ParallelStep(workload, step_module.rank_device(workload))
    step.capture()
    is_idle = []
    for _ in range(20):
        step()
        is_idle.append(torch.cuda.current_stream().query())
    return all(is_idle)


def killed_between_replays(workload):
    """Rank 1 dies after a replayed step; the others go on."""
    step = ParallelStep(workload, step_module.rank_device(workload))
    step.capture()
    step()
    torch.cuda.synchronize()
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(100):
        step()
    torch.cuda.synchronize()


# Whose gradient is left as a rank has it, by what is wrong then.
_OWN = {
    "norm left out": "layers.0.ln1.weight",
    "head left out": "lm_head.weight",
    "tiny left out": "tiny",
    "query left out": "query.bias",
}


def _broken(how: str) -> strategies.Prepare:
    """Strategy ``overlap`` with averaged gradients that are wrong: one of ``_OWN``, "sum", "stale" or "nan"."""

    def prepare(workload, *arguments):
        replica = _RIGHT(workload, *arguments)
        if workload.strategy != "overlap":
            return replica
        parameters, kept = dict(replica.model.module.named_parameters()), {}
        own = _OWN.get(how)
        if own is not None:
            parameters[own].register_hook(lambda gradient: kept.update({own: gradient.clone()}))

        def synchronize():
            replica.synchronize()
            for name, parameter in parameters.items():
                if how == "sum":
                    parameter.grad.mul_(dist.get_world_size())
                elif how == "stale":  # Those of the step before.
                    now = parameter.grad.clone()
                    parameter.grad.copy_(kept.get(name, now))
                    kept[name] = now
                elif name == own:
                    parameter.grad.copy_(kept[name])
            if how == "nan" and dist.get_rank() == 1:
                next(iter(parameters.values())).grad[0] = torch.nan

        return replace(replica, synchronize=synchronize)

    return prepare


def recorded(workload):
    """The collectives of a step, as (operator, bytes, dtype), and whether they run alone without touching the model."""
    step = ParallelStep(workload, CPU)
    step()
    with recorded_communication() as communications:
        step()
    before = [parameter.clone() for parameter in step.model.parameters()]
    run_alone([communication.launcher() for communication in communications])
    untouched = all(map(torch.equal, before, step.model.parameters()))
    return [(item.name, item.bytes, item.dtype) for item in communications], untouched


def bytes_of_uneven_exchange():
    """What this rank sends in a functional all-to-all, as recorded: one element to rank 0, and three to rank 1."""
    rank = dist.get_rank()
    with recorded_communication() as communications:
        received = [1, 1] if rank == 0 else [3, 3]
        arrived = functional_collectives.all_to_all_single(torch.ones(4), received, [1, 3], dist.group.WORLD)
        functional_collectives.wait_tensor(arrived)
    return [item.sent_bytes for item in communications]


def half_gradients(workload):
    """What the check finds; dtypes of gradients by name, with ranks and without; and those that ranks send."""
    dtypes = []
    with recorded_communication() as communications:
        for cell in (workload, workload.unsynchronized):
            step = ParallelStep(cell, CPU)
            start = len(communications)
            step.forward()
            step.backward()
            if step.replica.synchronize is not None:
                step.replica.synchronize()
                sent = {item.dtype for item in communications[start:]}
            named = step.replica.whole_parameters().items()
            dtypes.append({name: str(weight.grad.dtype).removeprefix("torch.") for name, weight in named})
    return verify_training(workload), *dtypes, sent


class _AsynchronousLaunches(TorchDispatchMode):
    """Lists the collectives that are launched, and whether each returns without waiting."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.namespace == "c10d":
            parameters = operator._schema.arguments
            arguments = dict(zip([parameter.name for parameter in parameters], args, strict=False)) | (kwargs or {})
            default = next(parameter.default_value for parameter in parameters if parameter.name == "async_op")
            self.found.append((operator.name().removeprefix("c10d::"), arguments.get("async_op", default)))
        return operator(*args, **(kwargs or {}))


def replayed_synchronous():
    """Collectives that wait at once, and the same run alone, as (operator, whether it was launched asynchronously)."""
    tensor, gathered, part = torch.ones(4), torch.empty(8), torch.empty(2)
    with _AsynchronousLaunches() as launches, recorded_communication() as communications:
        dist.all_reduce(tensor)
        dist.broadcast(tensor, 0)
        all_gather_single(gathered, tensor)
        reduce_scatter_single(part, tensor)
        dist.all_to_all_single(gathered, gathered.clone())
        dist.all_gather(list(tensor.chunk(2)), part)
        dist.barrier()
    with _AsynchronousLaunches() as alone:
        run_alone([communication.launcher() for communication in communications])
    return launches.found, alone.found


def done_when_launched():
    """Whether a collective to which rank 1 comes late is done when its launch returns."""
    tensor = torch.ones(4)
    dist.barrier()
    with communication_at_once():
        if dist.get_rank() == 1:
            time.sleep(0.1)
        work = dist.all_reduce(tensor, async_op=True)
        done = work.is_completed()
    work.wait()
    return done


def verify_compiled(workload) -> tuple[WeightDifference, int]:
    """With AOT autograd, which hooks meet, but without the minutes that code generation takes; counts the graphs."""
    from torch._dynamo.utils import counters

    original = torch.compile
    torch.compile = lambda code, **settings: original(code, backend="aot_eager", **settings)
    torch.compiler.reset()
    counters.clear()
    try:
        return verify_training(workload), counters["stats"]["unique_graphs"]
    finally:
        torch.compile = original
        torch.compiler.reset()


def measure_with_a_kept_rank(configuration, progress):
    """A cell, measured in a worker, whose ranks stay for the next one."""
    assert launch.kept(1, backend="gloo").run(dist.get_world_size) == [1]
    return Outcome("ok")


def verify_all(workloads):
    return [verify_training(workload) for workload in workloads]


def scalers(workloads):
    """For each, the class of what scales the loss, if it does."""
    steps = [ParallelStep(workload, CPU) for workload in workloads]
    return [type(step.scaler).__name__ for step in steps if step.scaler.is_enabled()]


def sent_by(run):
    """The bytes that this rank sends."""
    with recorded_communication() as communications:
        run()
    return sum(communication.sent_bytes for communication in communications if not communication.is_flags)


def observe_all(workloads):
    """For each, the memory at six moments and the bytes that a step sends."""
    observed = []
    for workload in workloads:
        step, memory, _ = build_recorded(functools.partial(ParallelStep, workload, CPU), CPU)
        observed.append((memory, sent_by(step)))
    return observed


def bytes_by_phase(workload):
    """What the second step sends in each of its phases, and what it has left under way."""
    step = ParallelStep(workload, CPU)
    step()
    sent = {name: sent_by(run) for name, run in step.phases.items()}
    return sent, sent_by(step.replica.whole_parameters)


def verify_and_count(workloads):
    """For each, how far weights are from those of one process, and the bytes that a step sends."""
    checked = []
    for workload in workloads:
        relative = verify_training(workload).relative
        step = ParallelStep(workload, CPU)
        # FSDP learns in the first step what is used after what.
        step()
        checked.append((relative, sent_by(step)))
    return checked


# Where ranks share layers or slices of sequences.
_SEEN, _PASS_ON, _MERGE = attention._Ring.seen, attention._Ring.pass_on, attention.merge_block


def _skip_a_block(*at):
    return (slice(0, 0), slice(None)) if at[1] == 1 and at[0]._rank == 1 else _SEEN(*at)


def _see_too_much(*at):
    """Ranks before the owner of a block let the queries of their first chunk see it, too."""
    return slice(None), _SEEN(*at)[1]


def _merge_by_halves(out, logsumexp, block_out, block_logsumexp):
    out.lerp_(block_out.to(out.dtype), 0.5)
    logsumexp.copy_(torch.logaddexp(logsumexp, block_logsumexp))


def _keep_the_first_logsumexp(out, logsumexp, block_out, block_logsumexp):
    """The forward pass is right, the backward pass computes with the logsumexp over the own block."""
    _MERGE(out, logsumexp.clone(), block_out, block_logsumexp)


def _lose_gradients_on_their_way(rank, block, step, contents):
    return _PASS_ON(rank, block * 0 if contents == attention._GRADIENTS else block, step, contents)


def _first_row_off(model, group, shapes):
    layers.share_layers(model, group, shapes)
    model.token_embeddings.first_row += model.token_embeddings.first_row > 0


OF_RINGS = {
    "a block is skipped": (attention._Ring, "seen", _skip_a_block),
    "a mask is wrong on one block": (attention._Ring, "seen", _see_too_much),
    "blocks are merged by halves": (attention, "merge_block", _merge_by_halves),
    "the logsumexp is that of the own block": (attention, "merge_block", _keep_the_first_logsumexp),
    "gradients are lost on their way": (attention._Ring, "pass_on", _lose_gradients_on_their_way),
    "positions are those in the slice": (tensor_strategies, "give_positions", lambda *_: None),
}
OF_LAYERS = {
    "input gradients not summed": (layers._Sum, "backward", staticmethod(lambda ctx, grad: (grad, None, None))),
    "outputs not summed": (layers.TensorGroup, "leave", lambda self, x: x),
    "norms' gradients not summed": (wrapper, "dist", mock.Mock()),
    "wrong first token": (wrapper, "share_layers", _first_row_off),
}


def count_block_runs(workload):
    """How often a step runs its blocks, forward or again; the compiler leaves them as they are."""
    runs = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda function, **_: function)
        step = ParallelStep(workload, torch.device("cpu"))
    for block in step.replica.model.layers:
        block.attn.register_forward_hook(lambda *_: runs.append(1))
    step()
    return len(runs)


def verify_faulty(fault, workload):
    """The check where something is forgotten; the trial of layers, which would refuse most models, is left out."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(wrapper, "require_same_results", lambda *arguments: None)
        patched.setattr(*(OF_RINGS | OF_LAYERS)[fault])
        return verify_training(workload)
