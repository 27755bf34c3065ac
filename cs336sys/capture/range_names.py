"""Names of the ranges by which a profiler shows a training step. No torch."""

import json
from typing import Any

WARM_UP = "warm-up"
STEP = "step"
# The phases of a step, in order; they do not overlap. ``bench`` counts the loss as part of the forward pass.
STEP_PHASES = ("forward", "loss", "backward", "optimizer")

ATTENTION_RANGE = "scaled dot product attention"
# The names that the handout gives them.
SCORES, SOFTMAX, FINAL_MATMUL = "computing attention scores", "computing softmax", "final matmul"
ATTENTION_PARTS = (SCORES, SOFTMAX, FINAL_MATMUL)

_RUN = "cs336sys "


def run_name(configuration: dict[str, Any]) -> str:
    """Return the name of the range around all measured steps, by which a report says what was run.

    JSON with single quotes, because torch.profiler does not escape the double ones of a name.
    """
    return _RUN + json.dumps(configuration, allow_nan=False).replace('"', "'")


def run_configuration(name: str) -> dict[str, Any] | None:
    """Return the configuration in a name of :func:`run_name`, JSON with single quotes; None for other ranges' names."""
    try:
        configuration = json.loads(name.removeprefix(_RUN).replace("'", '"')) if name.startswith(_RUN) else None
    except ValueError:
        return None
    return configuration if isinstance(configuration, dict) else None
