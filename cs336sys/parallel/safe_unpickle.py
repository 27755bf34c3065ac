"""Save and load what a checkpoint holds besides its tensors, so that no code can hide in it.

``torch.distributed.checkpoint`` pickles what is no tensor, and its list of what is where. Whoever unpickles runs what
the author of the file wrote. Here values are plain data and loaded by torch's unpickler for those, and the list by one
that knows the classes of such lists and no other.
"""

import enum
import io
import pickle
from collections import Counter, OrderedDict
from pathlib import Path
from types import NoneType
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from cs336sys.errors import UsageError, a_value

_LEAVES = (bool, int, float, complex, str, NoneType, Tensor, nn.Parameter)

_METADATA = "torch.distributed.checkpoint.metadata"
# By module and name, the globals of which torch's lists are made, dtypes aside.
_METADATA_GLOBALS = {
    *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "BytesStorageMetadata")),
    *((_METADATA, name) for name in ("TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties")),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    # The folder, where it was given as a path. The name is that of Python 3.13 and later.
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}


def require_plain(name: str, value: Any) -> None:
    """Refuse a value that could not be loaded without running code, or that would be loaded as another type."""
    kind = type(value)
    if kind in (dict, OrderedDict, Counter):
        for key, part in value.items():
            require_plain(f"a key of {name}", key)
            require_plain(f"{name}[{key!r}]", part)
    elif kind in (list, tuple):
        for index, part in enumerate(value):
            require_plain(f"{name}[{index}]", part)
    elif kind not in _LEAVES:
        raise UsageError(
            f"{name} is of type {kind.__module__}.{kind.__qualname__}: checkpoints hold tensors, numbers, strings, "
            "bools, None, and lists, tuples and dicts of these, because loading anything else may run code"
        )


class PlainReader(dcp.FileSystemReader):
    """Reads a checkpoint's list of what is where, ``.metadata``, without running code from it."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the list.

        Raises:
            UsageError: something is in it that is in no list of torch's.
            OSError, EOFError, pickle.UnpicklingError: it is missing or cut short.
        """
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"it holds {a_value(metadata)}")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()  # As torch's reader does.
        metadata.storage_meta.load_id = self.load_id
        return metadata


class PlainLoadPlanner(dcp.DefaultLoadPlanner):
    """Loads what is no tensor as plain data; torch's loads it, whatever it is."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn
        try:
            self.state_dict[key] = torch.load(value, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise UsageError(
                f"{key} is more than plain data, and loading it could run code: do not trust it"
            ) from error


class _MetadataUnpickler(pickle.Unpickler):
    """Looks up nothing but the globals of torch's lists: whatever else a pickle names could be called by it."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _METADATA_GLOBALS:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            # Pythons from 3.11.0 on, 3.11.2 of Debian 12 among them, pickle a member of an enumeration so.
            return _enumeration_member
        raise UsageError(
            f"the checkpoint's .metadata asks for {module}.{name}, which could run code and is in no list that torch "
            "saves: do not trust it"
        )


def _enumeration_member(enumeration: Any, name: Any) -> enum.Enum:
    """Stand in for getattr() in a pickle, but return members of enumerations only."""
    if not (isinstance(enumeration, enum.EnumMeta) and name in enumeration.__members__):
        raise UsageError(
            f"the checkpoint's .metadata asks for {name} of {enumeration}, which is no member of an enumeration "
            "and could run code: do not trust it"
        )
    return enumeration[name]
