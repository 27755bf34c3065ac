"""torch's dtypes by the names that commands and results give them."""

import torch

# In the order of workload.COLLECTIVE_DTYPES: first those of sizes.PRECISIONS.
DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
    "int32": torch.int32,
}
