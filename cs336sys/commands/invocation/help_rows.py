"""The rows in which ``--help`` shows a command's options: fewer than options, so that it fits on a screen."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

# Options that share a row, by the name of the first, and what it says of them.
_TOGETHER = {
    "--d-model": (("--d-ff",), "Model and inner width. Default: by size."),
    "--num-layers": (("--num-heads",), "Blocks and heads. Default: by size."),
    "--bf16": (("--fp16",), "Short for --precision bf16, --precision fp16."),
    "--loss": (("--batch",), "Its loss, its batches: FILE.py:NAME, too."),
    "--resume": (("--resume-any",), "Skip what --save has; any: however measured."),
    "--cell-timeout": (("--cool-down",), "Limit of a cell; wait between cells."),
    "--table": (("--columns",), "Only these tables; columns: size,step_ms."),
}


def _shows_default(option: Any) -> bool:
    return bool(option.show_default and option.default)


def in_fewer_rows(options: Sequence[Any]) -> list[Any]:
    """The options as help shows them: companions in one row, no ``--no-`` beside a flag that is off, no ``--help``."""
    by_name = {option.opts[0]: option for option in options if option.param_type_name == "option"}
    within = {
        companion: name
        for name, (companions, _) in _TOGETHER.items()
        for companion in companions
        if name in by_name
        and companion in by_name
        and not any(map(_shows_default, (by_name[name], by_name[companion])))
    }
    rows = []
    for option in options:
        name = option.opts[0]
        if name in within or "--help" in option.opts:
            continue
        shown = copy.copy(option)
        if getattr(option, "secondary_opts", None) and option.default is False:
            shown.secondary_opts, shown.show_default = [], False
        companions = [one for one in within if within[one] == name]
        if companions:
            shown.opts = [*option.opts, *companions]
            shown.help = _TOGETHER[name][1]
        if name in by_name:
            # Beside the name, what the value is called costs its own width alone, and not that of a column.
            value = "" if option.is_flag else option.metavar or ""
            shown.opts, shown.metavar = [f"{','.join(shown.opts)} {value}".rstrip()], ""
        rows.append(shown)
    return rows


@contextmanager
def narrow_columns() -> Iterator[None]:
    """While it lasts typer shows options with one space after a column: four of its six are empty in our rows."""
    from typer import rich_utils

    wide = rich_utils.STYLE_OPTIONS_TABLE_PADDING
    rich_utils.STYLE_OPTIONS_TABLE_PADDING = (0, 1, 0, 0)  # type: ignore[assignment]  # rich takes four, too
    try:
        yield
    finally:
        rich_utils.STYLE_OPTIONS_TABLE_PADDING = wide
