"""Training on several ranks: how gradients, optimizer state and weights are divided, sent and put together again.

- ``ranks/``: how are the processes started and ended?
- ``collectives.py``: how do they communicate, whatever the backend and the version of torch?
- ``rank_consistency.py``: are they about to train the same thing? ``wrapped_modules.py``: is it still what was wrapped?
- ``ddp.py``: data parallel training. Which gradients are sent together and where are they in memory
  (``buckets.py``), and when is their all-reduce launched (``gradient_synchronizer.py``)?
- ``sharded_optimizer/``: each rank keeps a share of the optimizer's state (ZeRO stage 1).
- ``fsdp/``: each rank keeps a slice of everything (ZeRO stage 3).
- ``tensor_parallel/``: ranks share every layer. ``context_parallel/``: ranks share every sequence.
"""
