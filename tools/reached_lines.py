"""Which test reaches which line, in its own process and in all that it starts.

A context is what lines are attributed to: 0 the import and collection, and from 1 on a test, or a fixture that several
tests share. Processes share a file with a byte for each line of each context, so that a rank that is killed has noted
what it reached.
"""

import contextlib
import json
import mmap
import sys
import threading
from pathlib import Path

HEADER_BYTES, CONTEXTS = 8, 4000


class ReachedLines:
    """The file that processes share.

    Args:
        path: an empty file; next to it stands ``layout.json``.
    """

    def __init__(self, path: Path):
        self.path = path
        self.first_column = json.loads(path.with_name("layout.json").read_text())
        self.width = self.first_column.pop("width")
        with path.open("r+b") as file:
            file.truncate(HEADER_BYTES + CONTEXTS * self.width)
            self.memory = mmap.mmap(file.fileno(), 0)

    @classmethod
    def create(cls, path: Path, sources: list[Path]) -> "ReachedLines":
        """Create the file for the lines of some sources."""
        layout, width = {}, 0
        for source in sources:
            layout[str(source)] = width
            width += len(source.read_bytes().splitlines()) + 2
        path.with_name("layout.json").write_text(json.dumps(layout | {"width": width}))
        path.write_bytes(b"")
        return cls(path)

    def switch(self, context: int) -> int:
        """Attribute the lines that follow to a context; return the one before."""
        before = int.from_bytes(self.memory[:4], sys.byteorder)
        self.memory[:4] = context.to_bytes(4, sys.byteorder)
        self.clear_caches()
        return before

    def lines_of(self, context: int) -> dict[str, list[int]]:
        """Return the lines that a context reached, by source."""
        start = HEADER_BYTES + context * self.width
        row = self.memory[start : start + self.width]
        lines = {}
        ends = [*self.first_column.values(), self.width][1:]
        for (source, first), end in zip(self.first_column.items(), ends, strict=True):
            if b"\1" in row[first:end]:
                lines[source] = [line for line, is_reached in enumerate(row[first:end]) if is_reached]
        return lines

    def folder_on_path(self) -> str:
        """Return a folder for PYTHONPATH, with which each Python that starts notes the lines that it reaches."""
        folder = self.path.with_name("starting")
        folder.mkdir(exist_ok=True)
        (folder / "sitecustomize.py").write_text(
            f"import pathlib, sys\nsys.path.append({str(Path(__file__).parent)!r})\nimport reached_lines\n"
            f"reached_lines.ReachedLines(pathlib.Path({str(self.path)!r})).trace()\n"
        )
        return str(folder)

    def trace(self) -> None:
        """Note the lines that this process reaches from here on, and those that are forked from it."""
        memory, context_now = self.memory, memoryview(self.memory)[:4].cast("I")
        current, row = -1, {}

        def trace_lines(frame, event, argument):
            nonlocal current, row
            if event == "line":
                if current != context_now[0]:
                    current = context_now[0]
                    begin = HEADER_BYTES + current * self.width
                    row = {source: begin + column for source, column in self.first_column.items()}
                    self.clear_caches()
                memory[row[frame.f_code.co_filename] + frame.f_lineno] = 1
            return trace_lines

        def trace_calls(frame, event, argument):
            return trace_lines if frame.f_code.co_filename in self.first_column else None

        threading.settrace(trace_calls)
        sys.settrace(trace_calls)

    def clear_caches(self) -> None:
        """Forget what functions of the sources have returned: another test has computed it, and this one needs it."""
        for module in list(sys.modules.values()):
            if getattr(module, "__file__", None) in self.first_column:
                for member in list(vars(module).values()):
                    with contextlib.suppress(AttributeError, TypeError):
                        member.cache_clear()
