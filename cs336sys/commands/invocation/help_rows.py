"""The rows in which ``--help`` shows a command's options: fewer than options, so that it fits on a screen."""

import copy
from collections.abc import Sequence
from typing import Any

# Options that share a row, by the name of the first, and what it says of them.
_TOGETHER = {
    "--d-model": (("--d-ff",), "Model and feed-forward width. Default: the size's own."),
    "--num-layers": (("--num-heads",), "Blocks, and their heads. Default: the size's own."),
    "--bf16": (("--fp16",), "Short for --precision bf16, and fp16."),
    "--loss": (("--batch",), "Yours, of (output, targets); (size, generator, device)."),
    "--resume": (("--resume-any",), "Skip cells that --save has; any: however measured."),
    "--table": (("--columns",), "Only these tables; columns: size,step_ms."),
}


def in_fewer_rows(options: Sequence[Any]) -> list[Any]:
    """The options as help shows them: companions in one row, no ``--no-`` beside a flag that is off, no ``--help``."""
    by_name = {option.opts[0]: option for option in options if option.param_type_name == "option"}
    within = {
        companion: name
        for name, (companions, _) in _TOGETHER.items()
        for companion in companions
        if name in by_name and companion in by_name
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
        rows.append(shown)
    return rows
