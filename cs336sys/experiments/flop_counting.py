"""Count a step of a user's model, for which there is no formula: parameters, FLOPs, calls of attention."""

import contextlib
import functools
from dataclasses import replace
from typing import Any

import torch

from cs336sys.experiments import user_models
from cs336sys.experiments.models import ATTENTION_FUNCTIONS, attention_kept, attention_replaced
from cs336sys.experiments.training import TrainStep
from cs336sys.measure.cells import Progress
from cs336sys.workload import Workload


def count_step(workload: Workload) -> user_models.StepCount:
    """Count a step of a user's model, for which there is no formula."""
    mode = "forward" if workload.mode == "forward" else "forward-backward"
    launched = replace(workload, mode=mode, precision="fp32", compile="off", cuda_graph="off", device="cpu")
    # Calls of torch's attention are not counted: whoever calls it decides by what a tensor holds, sometimes.
    return _counted(replace(launched, attention="sdpa", warmup=0, steps=1))


@functools.lru_cache(maxsize=4)
def _counted(workload: Workload) -> user_models.StepCount:
    without_scaling = torch.amp.GradScaler("cpu", enabled=False)
    make_step = functools.partial(TrainStep, workload, torch.device("meta"), scaler=without_scaling)
    with attention_kept():
        return user_models.count_on_meta_device(make_step, backward=workload.mode != "forward")


def counted_columns(step: "TrainStep", progress: Progress) -> dict[str, Any]:
    """``parameters``, and of a user's model ``flops`` and ``notes`` on what was found in it; before it is captured."""
    workload = step.workload
    if workload.is_ours:
        return {"parameters": workload.parameters}
    progress("counting")
    count = count_step(workload)
    attention = user_models.AttentionCalls()
    # Compiled code shows no calls. To ask for eager execution imports the compiler.
    eager = contextlib.nullcontext() if workload.compile == "off" else torch.compiler.set_stance("force_eager")
    # Of a model that calls cs336_basics' attention, as one that calls torch's.
    course = attention_replaced(ATTENTION_FUNCTIONS["sdpa"])
    with torch.no_grad(), eager, course:
        step.compute_logits(attention.watching())
    parameters = count.parameters or sum(parameter.numel() for parameter in step.model.parameters())
    # The backward pass of a product is two of its size; what is computed again does not count.
    times = 1 if workload.mode == "forward" else 3
    flops = None if count.flops is None else count.flops + times * attention.flops
    return {
        "parameters": parameters,
        "flops": flops,
        "notes": [
            *user_models.hidden_warnings(str(workload.user.model), user_models.hidden_parameters(step.model)),
            *_notes(workload, count, attention),
        ],
    }


def _notes(workload: Workload, count: user_models.StepCount, attention: user_models.AttentionCalls) -> list[str]:
    name = str(workload.user.model)
    notes = []
    if workload.attention == "flash":
        ours = attention.calls[""]
        if ours:
            notes.append(f"{name}: {ours} calls of torch's scaled_dot_product_attention are computed by flash")
        elif not attention.calls.total():
            notes.append(f"{name}: never calls torch's scaled_dot_product_attention, so flash takes the place of none")
        notes += [
            f"{name}: {times} of its {attention.calls.total()} calls of attention go to torch's, {reason}"
            for reason, times in attention.calls.items()
            if reason
        ]
    if count.failure:
        notes.append(f"{name}: no FLOPs, its step does not run on the meta device ({count.failure})")
    if count.reads:
        lines = ", ".join(f"{line} ({times} times)" for line, times in count.reads.items())
        notes.append(f"{name}: a step reads numbers from tensors, and waits for the GPU each time: {lines}")
    return notes
