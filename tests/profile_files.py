"""Reports of Nsight Systems and traces of torch.profiler, written row by row."""

import json
import sqlite3
from pathlib import Path

# The columns of 2025.3's export that matter, with some of those that do not.
TABLES = {
    "StringIds": "id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL",
    "CUPTI_ACTIVITY_KIND_KERNEL": "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, "
    "streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, demangledName INTEGER NOT NULL, "
    "shortName INTEGER NOT NULL, graphNodeId INTEGER",
    "CUPTI_ACTIVITY_KIND_MEMCPY": "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, "
    "correlationId INTEGER, globalPid INTEGER, bytes INTEGER NOT NULL, copyKind INTEGER NOT NULL",
    "CUPTI_ACTIVITY_KIND_MEMSET": "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, "
    "correlationId INTEGER, globalPid INTEGER, bytes INTEGER NOT NULL",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start INTEGER NOT NULL, end INTEGER NOT NULL, globalTid INTEGER, "
    "correlationId INTEGER, nameId INTEGER NOT NULL",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": "start INTEGER NOT NULL, end INTEGER NOT NULL, correlationId INTEGER",
    "NVTX_EVENTS": "start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER, text TEXT, "
    "globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER, domainId INTEGER",
}
START_END = 60


def global_thread(process: int, thread: int) -> int:
    """As nsys packs them, with a bit of hardware above."""
    return (1 << 56) | (process << 24) | thread


class NsysReport:
    """An exported report; tables come into being with their first row, as nsys's do."""

    def __init__(self, path: Path):
        self.path = path
        self.database = sqlite3.connect(path)
        self._strings: dict[str, int] = {}
        self._correlation = 0
        self._tables: set[str] = set()
        self.string("[unused]")

    def row(self, table: str, **values) -> None:
        if table not in self._tables:
            self.database.execute(f"CREATE TABLE {table} ({TABLES[table]})")
            self._tables.add(table)
        places = ", ".join("?" * len(values))
        names = ", ".join(f'"{name}"' for name in values)
        self.database.execute(f"INSERT INTO {table} ({names}) VALUES ({places})", tuple(values.values()))

    def string(self, text: str) -> int:
        if text not in self._strings:
            self._strings[text] = len(self._strings)
            self.row("StringIds", id=self._strings[text], value=text)
        return self._strings[text]

    def call(
        self,
        at: int,
        *,
        thread: int = 1,
        process: int = 100,
        correlation: int | None = None,
        name: str = "cudaLaunchKernel_v7000",
    ) -> int:
        """An API call that launches something; returns the correlation id."""
        if correlation is None:
            self._correlation += 1
            correlation = self._correlation
        values = {"start": at, "end": at + 5, "correlationId": correlation, "nameId": self.string(name)}
        self.row("CUPTI_ACTIVITY_KIND_RUNTIME", **values, globalTid=global_thread(process, thread))
        return correlation

    def ran(
        self, name: str, start: int, end: int, correlation: int, *, process: int = 100, node: int = 0, gpu: int = 0
    ) -> None:
        """A kernel on the GPU."""
        values = {"start": start, "end": end, "deviceId": gpu, "streamId": 7, "correlationId": correlation}
        values |= {"demangledName": self.string(name), "shortName": self.string(name.partition("<")[0])}
        self.row("CUPTI_ACTIVITY_KIND_KERNEL", **values, globalPid=global_thread(process, 0), graphNodeId=node)

    def kernel(
        self, name: str, at: int, start: int, end: int, *, thread: int = 1, process: int = 100, gpu: int = 0
    ) -> None:
        """A kernel launched at ``at`` that ran from ``start`` to ``end``."""
        self.ran(name, start, end, self.call(at, thread=thread, process=process), process=process, gpu=gpu)

    def copy(self, at: int, start: int, end: int, kind: int) -> None:
        self._moved("MEMCPY", at, start, end, copyKind=kind)

    def fill(self, at: int, start: int, end: int) -> None:
        self._moved("MEMSET", at, start, end)

    def _moved(self, activity: str, at: int, start: int, end: int, **more: int) -> None:
        values = {"start": start, "end": end, "deviceId": 0, "correlationId": self.call(at), "bytes": 8}
        self.row(f"CUPTI_ACTIVITY_KIND_{activity}", **values, globalPid=global_thread(100, 0), **more)

    def range(
        self,
        name: str,
        start: int,
        end: int | None,
        *,
        thread: int = 1,
        process: int = 100,
        kind: int = START_END,
        registered: bool = False,
    ) -> None:
        values = {"start": start, "end": end, "eventType": kind, "globalTid": global_thread(process, thread)}
        text = {"textId": self.string(name)} if registered else {"text": name}
        self.row("NVTX_EVENTS", **values, **text)

    def drop_column(self, table: str, column: str) -> None:
        self.database.execute(f'ALTER TABLE {table} DROP COLUMN "{column}"')

    def drop_table(self, table: str) -> None:
        self.database.execute(f"DROP TABLE {table}")

    def write(self) -> Path:
        self.database.commit()
        self.database.close()
        return self.path


class ChromeTrace:
    """A trace of torch.profiler; times are given in ns and written in us."""

    def __init__(self, path: Path):
        self.path = path
        name = {"ph": "M", "name": "process_name", "pid": 100, "tid": 0, "args": {"name": "python"}}
        self.events: list[dict] = [name]
        self._correlation = 0

    def event(self, category: str, name: str, start: int, end: int, tid, pid=100, **arguments) -> None:
        times = {"ts": start / 1e3, "dur": (end - start) / 1e3}
        self.events.append(
            {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid} | times | {"args": arguments}
        )

    def call(self, at: int, *, thread: int = 1, process: int = 100, category: str = "cuda_runtime") -> int:
        self._correlation += 1
        self.event(category, "launch", at, at + 5, thread, process, correlation=self._correlation)
        return self._correlation

    def kernel(
        self, name: str, at: int, start: int, end: int, *, thread: int = 1, category: str = "kernel", gpu: int = 0
    ) -> None:
        launcher = "cuda_driver" if name.startswith("triton") else "cuda_runtime"
        correlation = self.call(at, thread=thread, category=launcher)
        numbers = {"correlation": correlation, "External id": 3, "device": gpu}
        self.event(category, name, start, end, "stream 7", gpu, **numbers)

    def range(self, name: str, start: int, end: int, *, thread: int = 1, process: int = 100) -> None:
        self.event("user_annotation", name, start, end, thread, process)

    def operation(self, name: str, start: int, end: int, *, thread: int = 1) -> None:
        self.event("cpu_op", name, start, end, thread)

    def write(self) -> Path:
        document = {"schemaVersion": 1, "deviceProperties": [], "traceEvents": self.events, "traceName": "x"}
        self.path.write_text(json.dumps(document, indent=1))
        return self.path


def train_step(recorder, start: int = 0) -> None:
    """One step of 1000 ns, its backward pass launched by thread 2, as autograd does.

    Kernels (launch; run): forward 2 (10; 100-200, 20; 150-260, side by side), loss 1 (310; 320-330),
    backward 3 (410, 420, 430; 450-470, 470-490, 600-640), optimizer 1 (810; 820-900).
    """

    def kernel(name, at, begin, end, thread=1):
        recorder.kernel(name, start + at, start + begin, start + end, thread=thread)

    recorder.range("step", start, start + 1000)
    for number, name in enumerate(("forward", "loss", "backward", "optimizer")):
        begin = start + (5, 300, 400, 800)[number]
        recorder.range(name, begin, start + (290, 390, 790, 990)[number])
    kernel("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTN", 10, 100, 200)
    kernel("triton_poi_fused_add_0", 20, 150, 260)
    kernel("triton_red_fused_sum_1", 310, 320, 330)
    for at, begin, end in ((410, 450, 470), (420, 470, 490), (430, 600, 640)):
        kernel("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT", at, begin, end, thread=2)
    kernel("void at::native::vectorized_elementwise_kernel<4, at::native::lerp_functor<float>>(x)", 810, 820, 900)
