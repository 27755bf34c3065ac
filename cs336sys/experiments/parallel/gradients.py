"""The mean gradients that a rank holds between backward pass and optimizer step, by the names of the plain model."""

from torch import Tensor, nn

from cs336sys.parallel.ddp import BucketedDDP, FlatDDP, NaiveDDP, OverlappedDDP

_WRAPPERS = (NaiveDDP, FlatDDP, OverlappedDDP, BucketedDDP, nn.parallel.DistributedDataParallel)


def mean_gradients(model: nn.Module, *, is_sharded: bool) -> dict[str, tuple[Tensor | None, range | None]]:
    """Each parameter's mean gradient on this rank, and the rows of the parameter that it is of; None is all of them.

    All ranks call it together.

    Args:
        is_sharded: whether the strategy is ``fsdp`` or ``torch-fsdp``.
    """
    if not is_sharded:
        plain = model.module if isinstance(model, _WRAPPERS) else model
        assert isinstance(plain, nn.Module)
        return {name: (parameter.grad, None) for name, parameter in plain.named_parameters()}
    # Both bring torch's compiler, which the ranks of other strategies are spared.
    from torch.distributed.tensor import DTensor

    from cs336sys.parallel.fsdp import FSDP

    if isinstance(model, FSDP):
        found: dict[str, tuple[Tensor | None, range | None]] = {
            name: (parameter.shard.grad, parameter.rows) for name, parameter in model.sharded_parameters.items()
        }
        return found | {name: (parameter.grad, None) for name, parameter in model.replicated_parameters.items()}
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {
        name: (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient, None)
        for name, gradient in gradients.items()
    }
