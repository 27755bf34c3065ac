"""A profiler's capture, from whatever file, as arrays."""

import difflib
import functools
import math
import re
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple, Self, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from cs336sys.capture.intervals import Times
from cs336sys.capture.range_names import run_configuration
from cs336sys.errors import UsageError
from cs336sys.results.foreign import printable

SEND, RECEIVE, SEND_RECEIVE = "send", "recv", "send_recv"

# The key under which torch's record of a collective's parameters names it.
COLLECTIVE_ARGUMENT = "Collective name"

# Limits of a stranger's capture.
FILE_BYTES = 4 * 2**30
EVENTS = 10_000_000
READING_S = 600.0
TOO_SLOW = f"is not read within {READING_S:g} s of CPU time: profile fewer steps"
# Sums of times are 64 bits wide.
LATEST_NS = 1 << 61
# Templates have names of some thousand characters; strangers may write more.
_NAME_CHARACTERS = 8000
_NAMES = 1_000_000

# Kinds that all ranks leave together, for each needs what every other has sent.
SYNCHRONIZING = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
# A name may contain several, of which the first counts. Of a send and a receive, torch 2's kernel says both, its record
# which of the two.
_KINDS = (*SYNCHRONIZING, "broadcast", SEND_RECEIVE, SEND, RECEIVE, "gather", "scatter", "reduce")

# By the names of torch's profiler, of its collectives and of Triton, in lower case.
_ELEMENT_BYTES = {
    **dict.fromkeys(("double", "long", "long int", "float64", "int64"), 8),
    **dict.fromkeys(("float", "int", "float32", "int32"), 4),
    **dict.fromkeys(("half", "bfloat16", "c10::half", "c10::bfloat16", "float16", "short"), 2),
    **dict.fromkeys(("bool", "unsigned char", "signed char", "c10::float8_e4m3fn", "c10::float8_e5m2"), 1),
}


def collective_kind(name: str) -> str:
    """Return the kind of a collective by torch's name for it, Gloo's, or that of NCCL's kernel."""
    plain = name.replace("_", "").lower()
    if re.search("(oneshot|twoshot|crossdevice)reduce", plain):
        return "all_reduce"
    return next((kind for kind in _KINDS if kind.replace("_", "") in plain), "other")


def collective_bytes(arguments: Mapping[str, Any]) -> int:
    """Return the size of a collective as nccl-tests count it: the larger of what a rank gives and gets; 0 if unknown.

    Args:
        arguments: torch's record of its parameters, or those of an annotation: the shapes of its inputs.
    """
    if (dtype := arguments.get("dtype")) is not None:
        elements = [arguments.get(f"{way} msg nelems") for way in ("In", "Out")]
        counts = [count for count in elements if isinstance(count, int) and count >= 0]
        return max(counts, default=0) * _ELEMENT_BYTES.get(str(dtype).lower(), 1)
    sizes, types = arguments.get("Input Dims"), arguments.get("Input type")
    if not isinstance(sizes, list) or not isinstance(types, list):
        return 0
    return sum(count * width for _, count, width in tensors_of(sizes, types))


def tensors_of(sizes: Sequence[Any], types: Sequence[Any]) -> list[tuple[str, int, int]]:
    """Return dtype, number of elements and bytes of one of each tensor among recorded inputs."""
    return [
        (str(dtype), math.prod(size), _ELEMENT_BYTES[str(dtype).lower()])
        for size, dtype in zip(sizes, types, strict=False)
        if str(dtype).lower() in _ELEMENT_BYTES
        and isinstance(size, list)
        and all(isinstance(extent, int) and extent >= 0 for extent in size)
    ]


class CollectiveRecord(NamedTuple):
    """Torch's record of a collective: sequence and ranks of -1, bytes of 0, no communication and no peers: unrecorded.

    Attributes:
        communication: an identifier that all ranks that take part share.
        peers: sender and receiver.
    """

    kind: str
    group: str = ""
    sequence: int = -1
    bytes: int = 0
    ranks: int = -1
    communication: str = ""
    peers: tuple[int, int] | None = None


_type_hints = functools.cache(get_type_hints)


def _of_json(value: Any, annotation: Any) -> Any:
    """Return a value as its annotation has it: records and tuples, where JSON has objects and lists."""
    if isinstance(annotation, type) and is_dataclass(annotation):
        hints = _type_hints(annotation)
        # Files of earlier versions hold more.
        return annotation(**{name: _of_json(item, hints[name]) for name, item in value.items() if name in hints})
    origin, arguments = get_origin(annotation), get_args(annotation)
    if value is not None and type(None) in arguments:
        return _of_json(value, arguments[0])
    if origin is tuple:
        is_plain = arguments[0] in (int, float, str)
        return tuple(value if is_plain else (_of_json(item, arguments[0]) for item in value))
    if origin is Mapping:
        return {name: _of_json(item, arguments[1]) for name, item in value.items()}
    return value


class SavedRecord:
    """A dataclass that a results file holds."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)  # type: ignore[call-overload]  # of a dataclass

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        return _of_json(record, cls)


# Times are nanoseconds on one clock. Names, threads and streams are numbers into the texts of a capture; -1 is none.
@dataclass(frozen=True)
class Rows:
    """Columns of equal length."""

    @classmethod
    def of(cls, values: array) -> Self:
        """Return the columns of values that were appended row by row."""
        columns = np.array(values, np.int64).reshape(-1, len(fields(cls))).T
        return cls(*map(np.ascontiguousarray, columns))

    @classmethod
    def joined(cls, *tables: Self) -> Self:
        return cls(*(np.concatenate([getattr(table, column.name) for table in tables]) for column in fields(cls)))

    def select(self, chosen: NDArray[Any]) -> Self:
        """Return some rows, by a mask or by their numbers."""
        return type(self)(*(getattr(self, column.name)[chosen] for column in fields(self)))

    def __len__(self) -> int:
        return len(getattr(self, fields(self)[0].name))


@dataclass(frozen=True)
class DeviceWork(Rows):
    """Work of a GPU: kernels, copies, fills. ``correlation`` is the number of its launch in its process, and
    ``collective`` that of torch's record of it.
    """

    start: Times
    stop: Times
    process: Times
    correlation: Times
    name: Times
    gpu: Times
    stream: Times
    bytes: Times
    operation: Times
    collective: Times

    @property
    def length(self) -> Times:
        return self.stop - self.start


@dataclass(frozen=True)
class Calls(Rows):
    """API calls on a CPU: launches and waits."""

    process: Times
    correlation: Times
    start: Times
    stop: Times
    thread: Times
    name: Times


@dataclass(frozen=True)
class Ranges(Rows):
    """NVTX ranges, or those of torch.profiler."""

    name: Times
    start: Times
    stop: Times
    process: Times
    thread: Times


@dataclass(frozen=True)
class Operations(Rows):
    """Torch's operators: the number that their kernels carry, and that which forward and backward operator share."""

    number: Times
    start: Times
    stop: Times
    thread: Times
    name: Times
    shape: Times
    sequence: Times


NamedRows = TypeVar("NamedRows", Calls, Ranges, Operations)


class Texts:
    """Numbers of texts, which are made printable: strangers choose them."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self.list: list[str] = []

    def number(self, text: str) -> int:
        number = self._numbers.get(text)
        if number is None:
            if len(text) > _NAME_CHARACTERS:
                return self.number(f"{text[: _NAME_CHARACTERS - 3]}...")
            if len(self.list) >= _NAMES:
                text = "(other names)"
            number = self._numbers.setdefault(text, len(self.list))
            if number == len(self.list):
                self.list.append(printable(text))
        return number


@dataclass(frozen=True)
class Damage:
    """Parts of a capture that cannot be true or are missing.

    Attributes:
        sentences: what failed and how often, a sentence each.
        lost: (times, 2) process and time, on the CPU's clock, of launches whose work is missing or was left out.
        unlaunched: (times, 2) process and start of work whose launch is missing.
        hides_idle_time: launches and work do not fit together at all.
    """

    sentences: tuple[str, ...] = ()
    lost: Times = field(default_factory=lambda: np.zeros((0, 2), np.int64))
    unlaunched: Times = field(default_factory=lambda: np.zeros((0, 2), np.int64))
    hides_idle_time: bool = False

    @property
    def hides_times(self) -> bool:
        """It hides how long the GPU was idle in some part of the capture."""
        return self.hides_idle_time or len(self.lost) > 0


@dataclass(frozen=True)
class Capture:
    """A capture that was read.

    Attributes:
        profiler: what made it: ``Nsight Systems`` or ``torch.profiler``.
        launch: of each work, the number of its call; -1 for none.
        modules: calls of ``nn.Module``.
        collectives: torch's records, by their numbers.
        is_gpu: False where no GPU took part, and the CPU's operations replace work, each launched by itself and as
            long as it ran without those that it calls.
        rank, ranks: of the process, and how many there are; None and 0 where the file does not say so.
        gpu_names: by number.
        peak_bytes: the most memory that torch's allocator held allocated on each GPU.
        unreadable: how many events had no time, or one that cannot be.
        is_cut: the file ends too early.
    """

    profiler: str
    texts: Sequence[str]
    work: DeviceWork
    calls: Calls
    ranges: Ranges
    operations: Operations = field(default_factory=lambda: Operations.of(array("q")))
    modules: Ranges = field(default_factory=lambda: Ranges.of(array("q")))
    launch: Times = field(default_factory=lambda: np.zeros(0, np.int64))
    collectives: Sequence[CollectiveRecord] = ()
    is_gpu: bool = True
    rank: int | None = None
    ranks: int = 0
    gpu_names: Mapping[int, str] = field(default_factory=dict)
    peak_bytes: Mapping[int, int] = field(default_factory=dict)
    unreadable: int = 0
    is_cut: bool = False
    damage: Damage = field(default_factory=Damage)

    def range_names(self) -> dict[str, int]:
        """Count the occurrences of each range, the most frequent first."""
        counts = Counter(self.texts[number] for number in self.ranges.name.tolist())
        return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))

    def named(self, rows: NamedRows, test: Any) -> NamedRows:
        """Return the rows whose names pass a test."""
        return rows.select(self.is_named(rows.name, test))

    def require_range(self, name: str, option: str) -> None:
        """Raise a UsageError that lists ranges of similar names where there is none of this name."""
        names = self.range_names()
        if not names:
            raise UsageError(f"{option} '{name}': the capture holds no ranges: annotate the program with NVTX ranges")
        if name not in names:
            near = difflib.get_close_matches(name, names, n=5, cutoff=0.4)
            shown = list(dict.fromkeys([*near, *names]))[: max(8, len(near))]
            rest = f" and {len(names) - len(shown)} more" if len(shown) < len(names) else ""
            listed = ", ".join(f"'{choice}'" for choice in shown)
            raise UsageError(f"{option} '{name}': the capture has no range of this name; it has {listed}{rest}")

    def configuration(self) -> dict[str, Any] | None:
        """Return the configuration that ``cs336sys nsys`` ran; None for a capture of another program."""
        return next(filter(None, map(run_configuration, self.range_names())), None)

    def is_named(self, numbers: Times, test: Any) -> NDArray[np.bool_]:
        """Return for each number of a text whether the text passes a test."""
        distinct, places = np.unique(numbers, return_inverse=True)
        passes = [number >= 0 and bool(test(self.texts[number])) for number in distinct.tolist()]
        return np.array(passes, bool)[places.reshape(-1)]
