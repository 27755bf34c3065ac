"""A base for what watches torch's operators."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from cs336sys.late_compiler import importing_no_compiler


class DispatchMode(TorchDispatchMode):
    """A ``TorchDispatchMode`` that does not import torch's compiler, which torch has leave out every mode."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__torch_dispatch__" in cls.__dict__:
            importing_no_compiler(cls.__torch_dispatch__)
