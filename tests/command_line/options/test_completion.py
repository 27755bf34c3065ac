"""What a shell offers for the value of an option, asked for as typer's scripts for bash ask."""

import importlib
import re
import sys

from test_options_figures import offered

from cs336sys.cli import COMMANDS, module_of
from cs336sys.errors import UsageError

# Which tables and columns there are is known when there are tables.
OF_TABLES = {"--table", "--columns", "--sort"}


def test_every_option_that_takes_one_of_some_names_offers_them(every_command, monkeypatch):
    """An option that offers nothing must not refuse a word because it is none of some names."""

    def stop(*arguments, **settings):
        raise UsageError("this would be measured")

    for name in COMMANDS:
        module = importlib.import_module(module_of(name))
        if hasattr(module, "run_sweep"):
            monkeypatch.setattr(module, "run_sweep", stop)
    offering, refused = 0, []
    for context, command in every_command:
        for option in command.params:
            if getattr(option, "metavar", None) not in ("<name>", "<a,b>") or option.opts[0] in OF_TABLES:
                continue
            if option.shell_complete(context, ""):
                offering += 1
            elif command.name not in ("doctor", "report"):
                try:
                    command.invoke(command.make_context(command.name, [option.opts[0], "zzz"], parent=context.parent))
                except Exception as error:
                    refused += re.findall(rf"^{option.opts[0]} 'zzz': choose from .*", str(error))
    assert refused == [], "give the option autocompletion=among(its names)"
    assert offering > 60


def test_completion_imports_no_torch():
    before = set(sys.modules)
    assert offered("cs336sys memprof --checkpoint n") == ["none", "nested"]
    assert not {"torch", "triton", "matplotlib"} & (set(sys.modules) - before)
