"""A profiler's capture, from whatever file, as arrays."""

import difflib
import math
import re
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import partial
from typing import Any, NamedTuple, Self, TypeVar, get_args, get_origin

import numpy as np
from numpy.typing import NDArray

from cs336sys.capture.intervals import Times
from cs336sys.errors import UsageError
from cs336sys.findings import sentence
from cs336sys.results.foreign import printable

SEND, RECEIVE, SEND_RECEIVE = "send", "recv", "send_recv"

COLLECTIVE_ARGUMENT = "Collective name"  # The key under which torch's record of a collective's parameters names it.

# Limits of a stranger's capture.
FILE_BYTES = 4 * 2**30
EVENTS = 10_000_000
READING_S = 600.0
TOO_SLOW = f"is not read within {READING_S:g} s of CPU time: profile fewer steps"
EMPTY = "is empty: nothing was written to it"
LATEST_NS = 1 << 61  # Sums of times are 64 bits wide.
_NAME_CHARACTERS = 8000  # Templates have names of some thousand characters; strangers may write more.
_NAMES = 1_000_000

# Kinds that all ranks leave together, for each needs what every other has sent.
SYNCHRONIZING = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
# A name may contain several: the first counts. Torch 2 names a kernel after send and receive: its record says which.
_KINDS = (*SYNCHRONIZING, "broadcast", SEND_RECEIVE, SEND, RECEIVE, "gather", "scatter", "reduce")

# By the names of torch's profiler, of its collectives and of Triton, in lower case.
_ELEMENT_BYTES = {
    **dict.fromkeys(("double", "long", "long int", "float64", "int64"), 8),
    **dict.fromkeys(("float", "int", "float32", "int32"), 4),
    **dict.fromkeys(("half", "bfloat16", "c10::half", "c10::bfloat16", "float16", "short"), 2),
    **dict.fromkeys(("bool", "unsigned char", "signed char", "c10::float8_e4m3fn", "c10::float8_e5m2"), 1),
}


# Renders a block of ``sentences.jinja``: what a capture lacks, or why a file cannot be read.
say_capture = partial(sentence, __package__, number="{:,.0f}".format)


class ForeignFileError(UsageError):
    """A file is of another program than a profiler."""


def collective_kind(name: str) -> str:
    """Return the kind of a collective by torch's name for it, Gloo's, or that of NCCL's kernel."""
    letters = name.replace("_", "").lower()
    if re.search("(oneshot|twoshot|crossdevice)reduce", letters):  # Inference engines' own kernels.
        return "all_reduce"
    return next((kind for kind in _KINDS if kind.replace("_", "") in letters), "other")


def collective_bytes(arguments: Mapping[str, Any]) -> int:
    """Return the size of a collective as nccl-tests count it: the larger of what a rank gives and gets; 0 if unknown.

    ``arguments`` are torch's record of its parameters, or those of an annotation: the shapes of its inputs.
    """
    if (dtype := arguments.get("dtype")) is not None:
        recorded = [arguments.get(f"{way} msg nelems") for way in ("In", "Out")]
        counts = [count for count in recorded if type(count) is int and count >= 0]
        # Byte, Char and the Float8s are not in the table.
        return max(counts, default=0) * _ELEMENT_BYTES.get(str(dtype).lower(), 1)
    shapes, dtypes = arguments.get("Input Dims"), arguments.get("Input type")
    if not isinstance(shapes, list) or not isinstance(dtypes, list):
        return 0
    return sum(count * element_bytes for _, count, element_bytes in tensors_of(shapes, dtypes))


def tensors_of(shapes: Sequence[Any], dtypes: Sequence[Any]) -> list[tuple[str, int, int]]:
    """Return the dtype, the number of elements and the bytes of an element of each recorded input that is a tensor."""
    return [
        (str(dtype), math.prod(shape), _ELEMENT_BYTES[str(dtype).lower()])
        for shape, dtype in zip(shapes, dtypes, strict=False)
        if str(dtype).lower() in _ELEMENT_BYTES
        and isinstance(shape, list)
        and all(type(extent) is int and extent >= 0 for extent in shape)
    ]


class CollectiveRecord(NamedTuple):
    """Torch's record of a collective; the defaults stand for what it did not record."""

    kind: str
    group: str = ""
    sequence: int = -1
    bytes: int = 0
    ranks: int = -1
    communication: str = ""  # An identifier that all participating ranks share.
    peers: tuple[int, int] | None = None  # Ranks of the sender and the receiver.


def _from_json(value: Any, annotation: Any) -> Any:
    """Return a JSON value as its annotation has it: dataclasses and tuples where JSON has objects and lists."""
    if isinstance(annotation, type) and is_dataclass(annotation):
        types = {member.name: member.type for member in fields(annotation)}
        # Files of earlier versions hold fields that no longer exist.
        return annotation(**{name: _from_json(item, types[name]) for name, item in value.items() if name in types})
    origin, arguments = get_origin(annotation), get_args(annotation)
    if value is not None and type(None) in arguments:  # X | None
        return _from_json(value, arguments[0])
    if origin is tuple:  # tuple[X, ...]: all members are of one type.
        has_scalars = arguments[0] in (int, float, str)  # No call for each number of a long series.
        return tuple(value if has_scalars else (_from_json(item, arguments[0]) for item in value))
    if origin is Mapping:
        return {name: _from_json(item, arguments[1]) for name, item in value.items()}
    return value


class SavedRecord:
    """Base of dataclasses that results files hold."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)  # type: ignore[call-overload]  # of a dataclass

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        return _from_json(record, cls)


@dataclass(frozen=True)
class Rows:
    """Columns of equal length, a value for each event.

    Times are nanoseconds on one clock. Names, threads and streams are numbers of the capture's texts; -1 is none.
    """

    name: Times
    start: Times
    stop: Times

    @property
    def length(self) -> Times:
        return self.stop - self.start

    @classmethod
    def of(cls, values: array) -> Self:
        """Return the columns of values that were appended row by row, an array of ``"q"``."""
        columns = np.array(values, np.int64).reshape(-1, len(fields(cls))).T
        return cls(*map(np.ascontiguousarray, columns))

    @classmethod
    def joined(cls, *tables: Self) -> Self:
        return cls(*(np.concatenate([getattr(table, column.name) for table in tables]) for column in fields(cls)))

    def select(self, chosen: NDArray[Any]) -> Self:
        """Return some rows, by a mask or by their numbers."""
        return type(self)(*(getattr(self, column.name)[chosen] for column in fields(self)))

    def __len__(self) -> int:
        return len(self.name)


@dataclass(frozen=True)
class DeviceWork(Rows):
    """Work of a GPU: kernels, copies and fills."""

    process: Times
    correlation: Times  # The profiler's number of the launch, which the call has, too.
    gpu: Times
    stream: Times
    bytes: Times
    operation: Times  # Number of the operator that launched it.
    collective: Times  # Place of torch's record in the capture's collectives.


@dataclass(frozen=True)
class Calls(Rows):
    """API calls on a CPU: launches and waits."""

    process: Times
    correlation: Times
    thread: Times


@dataclass(frozen=True)
class Ranges(Rows):
    """NVTX ranges, or those of torch.profiler."""

    process: Times
    thread: Times


@dataclass(frozen=True)
class Operations(Rows):
    """Torch's operators."""

    number: Times  # Which their kernels carry, too.
    thread: Times
    shape: Times  # Number of a text: JSON with the shapes and dtypes of the inputs.
    sequence: Times  # Shared by forward and backward operator.


AnyRows = TypeVar("AnyRows", bound=Rows)


class Texts(dict[str, int]):
    """Numbers of texts, which are given at first sight; ``list`` has them printable, for strangers choose them."""

    def __init__(self) -> None:
        super().__init__()
        self.list: list[str] = []

    def __missing__(self, text: str) -> int:
        if len(text) > _NAME_CHARACTERS:
            return self[f"{text[: _NAME_CHARACTERS - 3]}..."]
        if len(self.list) >= _NAMES:
            text = "(other names)"
        number = self.setdefault(text, len(self.list))
        if number == len(self.list):  # Else it was "(other names)", and not the first of these.
            self.list.append(printable(text))
        return number


@dataclass(frozen=True)
class Damage:
    """Parts of a capture that cannot be true or are missing."""

    sentences: tuple[str, ...] = ()  # What failed and how often.
    # (times, 2) process and time, on the CPU's clock, of launches whose work is missing or was left out.
    lost: Times = field(default_factory=lambda: np.zeros((0, 2), np.int64))
    # (times, 2) process and start of work whose launch is missing.
    unlaunched: Times = field(default_factory=lambda: np.zeros((0, 2), np.int64))
    hides_idle_time: bool = False  # Launches and work do not fit together at all.

    @property
    def hides_times(self) -> bool:
        """Return whether it hides how long the GPU was idle in some part of the capture."""
        return self.hides_idle_time or len(self.lost) > 0


@dataclass(frozen=True)
class Capture:
    """A capture that was read."""

    profiler: str  # What made it: "Nsight Systems" or "torch.profiler".
    texts: Sequence[str]
    work: DeviceWork
    calls: Calls
    ranges: Ranges
    operations: Operations = field(default_factory=lambda: Operations.of(array("q")))
    modules: Ranges = field(default_factory=lambda: Ranges.of(array("q")))  # Calls of nn.Module.
    # For each work, the row of its launch in calls; -1 for none.
    launch: Times = field(default_factory=lambda: np.zeros(0, np.int64))
    collectives: Sequence[CollectiveRecord] = ()  # Torch's records, which work.collective points at.
    # False where no GPU took part: the CPU's operations replace work, each as long as it ran without those it calls.
    is_gpu: bool = True
    rank: int | None = None  # The process's; None where the file does not say so.
    ranks: int = 0  # The world size; 0 where the file does not say so.
    gpu_names: Mapping[int, str] = field(default_factory=dict)  # By the GPU's number.
    peak_bytes: Mapping[int, int] = field(default_factory=dict)  # By GPU, the most that torch's allocator held.
    unreadable: int = 0  # How many events had no time, or an impossible one.
    incomplete_launches: Collection[int] = ()  # Launch numbers of work among them.
    is_cut: bool = False  # The file ends too early.
    damage: Damage = field(default_factory=Damage)

    def range_names(self) -> dict[str, int]:
        """Count the occurrences of each range, the most frequent first."""
        counts = Counter(self.texts[number] for number in self.ranges.name.tolist())
        return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))

    def rows_named(self, rows: AnyRows, test: Callable[[str], Any]) -> AnyRows:
        """Return the rows whose names pass a test."""
        return rows.select(self.is_named(rows.name, test))

    def require_range(self, name: str, option: str) -> None:
        """Raise a UsageError that lists ranges of similar names where there is none of this name."""
        names = self.range_names()
        if not names:
            raise UsageError(f"{option} '{name}': the capture holds no ranges: annotate the program with NVTX ranges")
        if name not in names:
            similar = difflib.get_close_matches(name, names, n=5, cutoff=0.4)
            shown = list(dict.fromkeys([*similar, *names]))[:8]
            more = f" and {len(names) - len(shown)} more" if len(shown) < len(names) else ""
            listed = ", ".join(f"'{choice}'" for choice in shown)
            raise UsageError(f"{option} '{name}': the capture has no range of this name; it has {listed}{more}")

    def is_named(self, numbers: Times, test: Callable[[str], Any]) -> NDArray[np.bool_]:
        """Return for each number of a text whether the text passes a test; False for -1."""
        distinct, index_in_distinct = np.unique(numbers, return_inverse=True)
        passes = [number >= 0 and bool(test(self.texts[number])) for number in distinct.tolist()]
        return np.array(passes, bool)[index_in_distinct]
