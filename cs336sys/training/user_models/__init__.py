"""Models that are not ours, with their losses, batches and optimizers: what takes the place of what we know of ours.

- ``loading.py``: how is the user's code found and called (next to a ``cs336_basics`` of the user's, too), and how are
  its errors reported? Which optimizer does a function of it make?
- ``attention.py``: how does another attention take the place of ``torch.nn.functional``'s?
- ``modules.py``: which of its modules are the blocks, which tensors look like parameters and are none, and how does a
  model get its first values one layer at a time?
"""

from cs336sys.training.user_models.attention import (
    AttentionCall,
    left_to_torch,
    nothing_dropped,
    replace_attention,
    torch_attention,
    watched_attention,
    without_dropout,
)
from cs336sys.training.user_models.loading import (
    build,
    call_model,
    copied_code,
    innermost_line,
    load,
    make_optimizer,
    make_user_batch,
    optimizer_class,
    overriding_settings,
    references_of,
    scalar_loss,
    telling_errors_of,
    telling_user_errors,
    token_logits,
)
from cs336sys.training.user_models.modules import (
    fill,
    find_blocks,
    hidden_parameters,
    hidden_warnings,
    layer_initializer,
    tiny_sizes,
)
