"""One rank's training step: its share of the batch, and a phase for what waits for other ranks."""

import contextlib
import functools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from cs336sys.errors import CapabilityError
from cs336sys.machine.device import choose_device, synchronize
from cs336sys.settings.choices import WARM_UP_STEPS, WARM_UP_STEPS_OF_TORCH_DDP
from cs336sys.settings.parallel import ParallelWorkload
from cs336sys.training import user_models
from cs336sys.training.cuda_graphs import CudaRecorder, require_graphs
from cs336sys.training.profiler_ranges import Marks, NvtxMarks, phase
from cs336sys.training.ranks.strategies import OptimizerChoice, Replica, sequences_of_rank
from cs336sys.training.step import TrainStep, set_matmul_precision


class ParallelStep(TrainStep):
    """A training step of this rank on its share of the batch.

    The phases are ``forward``, ``backward``, ``synchronize`` where the strategy has something to do between backward
    pass and optimizer step, and ``optimizer``. Under Nsight Systems they and every launch of a collective by a bucket
    are NVTX ranges.

    Updated parameters are sent at the beginning of the next forward pass, during which they arrive.

    In CUDA graphs a phase waits for what it has launched: a strategy that communicates during the backward pass
    synchronizes in that phase, and one that updates parameters meanwhile does that in it, too. Weights that are
    gathered ahead for the backward pass arrive in the forward pass.

    Args:
        optimizer_settings: for the optimizer, beyond those of the workload's choice.
    """

    takes_half_gradients = False  # Wrappers are made for gradients of the parameters' dtype.

    def __init__(self, workload: ParallelWorkload, device: torch.device, **optimizer_settings: Any):
        set_matmul_precision(workload.training)
        _refuse_unsupported(workload)
        if not workload.training.is_ours:
            # The training in one process that checks this rank's would draw other masks.
            user_models.without_dropout()
        choice = OptimizerChoice(workload.training, optimizer_settings)
        self.warmup_of_capture = warmup_of_capture(workload)
        in_graphs = workload.training.uses_graphs
        self._recorder = recorder_of(device) if in_graphs else None
        # torch's DDP holds on to the stream that it is built on.
        with self.on_launch_stream():
            replica: Replica = workload.strategy_record.load("wraps")(workload, device, choice)
        training = workload.training
        if not workload.uses_autocast:
            # The wrapper computes in half precision itself; the optimizer is built already, with its state's dtype.
            training = replace(training, precision="fp32", state_dtype="fp32")
        super().__init__(
            training,
            device,
            model=replica.model,
            optimizer=replica.optimizer,
            share=sequences_of_rank(workload) if replica.share is None else replica.share,
            scaler=replica.scaler_class(device.type, enabled=workload.training.scales_loss),
        )
        self.replica = replica
        self._is_captured_whole = workload.strategy_record.is_captured_whole
        if replica.loss is not None:
            self._loss_function = replica.loss
        self._around_passes = contextlib.ExitStack()  # What forward() has entered, for backward() to leave.
        self._arrange_phases(in_graphs)
        # Set by Nsight Systems in the processes that it watches.
        if device.type == "cuda" and "NSYS_PROFILING_SESSION_ID" in os.environ:
            self.mark(NvtxMarks())

    def _arrange_phases(self, in_graphs: bool) -> None:
        """Put what the strategy does besides computing into the phases, or between them."""
        replica = self.replica
        # Changed in place: TrainStep launches the phases of this dictionary again when graphs are released.
        if replica.synchronize is not None:
            optimizer = self.phases.pop("optimizer")
            if in_graphs and replica.communicates_in_backward:  # A graph must wait for what it has launched.
                self.phases["backward"] = functools.partial(_call_in_turn, self.backward, replica.synchronize)
            else:
                self.phases["synchronize"] = replica.synchronize
            self.phases["optimizer"] = optimizer
        if replica.sharded is not None:
            # Sent after the last phase, parameters would arrive while nothing is timed.
            replica.sharded.defer_exchange()
            exchange = (replica.sharded.start_exchange, self.forward, replica.sharded.wait_for_parameters)
            self.phases["forward"] = functools.partial(_call_in_turn, *exchange)
        if in_graphs and replica.wait_for_gathers is not None:  # For what forward gathers ahead.
            self.phases["forward"] = functools.partial(_call_in_turn, self.forward, replica.wait_for_gathers)

    def forward(self) -> None:
        """Compute this rank's loss, weighted, within what the strategy puts around both passes."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.replica.around())
            super().forward()
            self._around_passes = stack.pop_all()  # backward() leaves it.
        if self.replica.loss_weight != 1.0:
            assert self.loss is not None
            self.loss = self.loss * self.replica.loss_weight

    def backward(self) -> None:
        with self._around_passes:
            super().backward()

    def __call__(self) -> None:
        """Run one step. Replays have ended when it returns, so that collectives may be launched.

        With ``NCCL_GRAPH_MIXING_SUPPORT=0`` NCCL allows no other collectives while a graph with collectives runs.
        """
        super().__call__()
        if self.graphs is not None:
            synchronize(self.device)

    def on_launch_stream(self) -> AbstractContextManager[None]:
        """Choose the stream on which the step is launched until it is captured: the one it was built on."""
        return contextlib.nullcontext() if self._recorder is None else self._recorder.on_launch_stream()

    def capture(self, **settings: Any) -> None:
        """Capture as :class:`TrainStep` does. All ranks call it together: they communicate while they warm up.

        torch's ``fully_shard`` becomes one phase, ``step``: its backward pass waits for events of its forward pass, so
        that one graph must hold both (pytorch #171835).
        """
        if self._is_captured_whole and self.workload.uses_graphs:
            self._launched = {"step": functools.partial(_call_in_turn, *self._launched.values())}
        super().capture(**{"recorder": self._recorder, **settings})

    def mark(self, marks: Marks) -> None:
        """Decorate phases and launches, so that each call is a range of a profiler from now on."""
        self.phases = {name: phase(name, marks)(run) for name, run in self.phases.items()}
        for number, bucket in enumerate(self.replica.buckets):
            decorate: Any = marks.range(f"launch bucket {number}")
            bucket.launch = decorate(bucket.launch)  # An attribute of this bucket, not of its class.


def _refuse_unsupported(workload: ParallelWorkload) -> None:
    """Refuse optimizers that cannot update what the strategy shards."""
    if workload.training.splits_weights and not workload.strategy_record.takes_split_weights:
        raise CapabilityError(f"strategy '{workload.strategy}' shards weights in fp32: choose another --state-dtype")
    if workload.training.optimizer_record.is_ours and workload.strategy_record.keeps_dtensors:
        raise CapabilityError(
            f"strategy '{workload.strategy}' keeps DTensors, which the kernels of adamw cannot take: choose fused"
        )


def recorder_of(device: torch.device) -> CudaRecorder:
    """Return the recorder that captures a rank's step; refuse one whose collectives cannot be captured."""
    require_graphs(device)
    if dist.get_backend() != "nccl":
        raise CapabilityError("backend 'gloo' communicates on the CPU, which no CUDA graph can hold: choose nccl")
    return CudaRecorder(device)


def _call_in_turn(*functions: Callable[[], None]) -> None:
    for function in functions:
        function()


def warmup_of_capture(workload: ParallelWorkload) -> int:
    """Count the steps before a step is captured in CUDA graphs."""
    return WARM_UP_STEPS_OF_TORCH_DDP if workload.strategy_record.uses_torch_ddp else WARM_UP_STEPS


def rank_device(workload: ParallelWorkload) -> torch.device:
    """Return this rank's device: the CPU, or a GPU of its own; ranks of Gloo share GPUs where there are too few."""
    device = choose_device(workload.training.device)
    if device.type == "cpu":
        return device
    local_rank = int(os.environ.get("LOCAL_RANK", dist.get_rank()))
    torch.cuda.set_device(local_rank % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())
