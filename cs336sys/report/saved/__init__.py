"""Saved results shown again: which cells belong together (``invocation``), how a command's are shown (``commands``)."""

from cs336sys.report.saved.commands import SAVED_COMMANDS, Pictures, Presentation
from cs336sys.report.saved.invocation import Invocation, invocations
from cs336sys.report.saved.page import Shown, saved_page
from cs336sys.report.saved.shown import marked, saved_pictures, saved_tables, shown_cells, sound_cells_and_tables

__all__ = [
    "SAVED_COMMANDS",
    "Invocation",
    "Pictures",
    "Presentation",
    "Shown",
    "invocations",
    "marked",
    "saved_page",
    "saved_pictures",
    "saved_tables",
    "shown_cells",
    "sound_cells_and_tables",
]
