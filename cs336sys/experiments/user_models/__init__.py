"""Models that are not ours, with their losses, batches and optimizers: what takes the place of what we know of ours.

- ``loading.py``: how is the user's code found, called (with a ``cs336_basics`` of its own, too), and its errors told?
- ``blocks.py``: which of its modules are the blocks, and which tensors look like parameters and are none?
- ``attention.py``: how does another attention take the place of ``torch.nn.functional``'s?
- ``optimizers.py``: how does a function make an optimizer of some of the parameters?
- ``initialization.py``: how does a model get its first values one layer at a time?
- ``flop_counting.py``: how many FLOPs does a step have, and how often does it call attention?
"""

from cs336sys.experiments.user_models.attention import (
    as_written,
    left_to_torch,
    nothing_dropped,
    replace_attention,
    torch_attention,
    without_dropout,
)
from cs336sys.experiments.user_models.blocks import find_blocks, hidden_parameters, hidden_warnings
from cs336sys.experiments.user_models.flop_counting import AttentionCalls, StepCount, count_on_meta_device
from cs336sys.experiments.user_models.initialization import fill, layer_initializer, tiny_sizes, why_built_whole
from cs336sys.experiments.user_models.loading import (
    build,
    call_model,
    copied_code,
    first_part,
    load,
    make_user_batch,
    references_of,
    scalar_loss,
    telling_errors_of,
    telling_user_errors,
    token_logits,
)
from cs336sys.experiments.user_models.optimizers import changeable, make_optimizer, optimizer_class

__all__ = [
    "AttentionCalls",
    "StepCount",
    "as_written",
    "build",
    "call_model",
    "changeable",
    "copied_code",
    "count_on_meta_device",
    "fill",
    "find_blocks",
    "first_part",
    "hidden_parameters",
    "hidden_warnings",
    "layer_initializer",
    "left_to_torch",
    "load",
    "make_optimizer",
    "make_user_batch",
    "nothing_dropped",
    "optimizer_class",
    "references_of",
    "replace_attention",
    "scalar_loss",
    "telling_errors_of",
    "telling_user_errors",
    "tiny_sizes",
    "token_logits",
    "torch_attention",
    "why_built_whole",
    "without_dropout",
]
