"""The tables of ``account memory``: parts on the fullest rank, and where they come from."""

from collections.abc import Sequence
from dataclasses import dataclass

from cs336sys.accounting.answers.memory import RankMemory, rank_memory, state_answers
from cs336sys.accounting.memory import GIB
from cs336sys.accounting.parameters import count_parameters
from cs336sys.report.account.answers import answers_table
from cs336sys.report.tables import Column, Table
from cs336sys.sizes import ELEMENT_BYTES, ModelSize


@dataclass(frozen=True)
class MemorySetting:
    """One row: a model, and how it is trained.

    Attributes:
        size: its batch is that of all ranks together.
        element_bytes: of parameters and gradients.
    """

    size: ModelSize
    world_size: int
    strategy: str
    precision: str
    mode: str
    attention: str
    element_bytes: int = 4

    @property
    def memory(self) -> RankMemory:
        return rank_memory(
            self.size,
            self.world_size,
            self.strategy,
            precision=self.precision,
            element_bytes=self.element_bytes,
            mode=self.mode,
            attention=self.attention,
        )


_COLUMNS = (
    Column("size", "size"),
    Column("parameters", "parameters", "parameters"),
    Column("context", "context"),
    Column("precision", "precision"),
    Column("mode", "mode"),
    Column("world_size", "ranks"),
    Column("strategy", "strategy"),
    Column("parameters_gib", "parameters", "gib"),
    Column("gradients_gib", "gradients", "gib"),
    Column("optimizer_state_gib", "optimizer state", "gib"),
    Column("master_parameters_gib", "master parameters", "gib"),
    Column("after_initialization_gib", "after initialization", "gib"),
    Column("before_first_step_gib", "before first step", "gib"),
    Column("first_peak_gib", "most until then", "gib"),
    Column("after_first_step_gib", "after first step", "gib"),
    Column("activations_gib", "activations at the peak", "gib"),
    Column("peak_gib", "peak of later steps", "gib"),
    Column("moment", "at"),
)


def memory_tables(settings: Sequence[MemorySetting]) -> list[Table]:
    """Parts, the handout's three times and the peak; then the derivation for each size and number of ranks."""
    notes = [
        "The fullest rank, eager mode; the batch is shared out equally. Forward alone makes no gradients and needs no "
        "optimizer.",
    ]
    if any(setting.strategy in ("optimizer-flat", "fsdp") for setting in settings):
        notes.append(
            "Assumed: buffers for gathered weights (fsdp) and gradients on their way (optimizer-flat, fsdp) are left "
            "out, as fsdp_accounting (a) allows. Under autocast fsdp's peak counts half-precision copies of the "
            "weights, which it does not keep when it gathers in that precision: there it is an upper bound."
        )
    title = f"Memory of a rank: {', '.join(dict.fromkeys(_batch_words(setting) for setting in settings))}"
    tables = [Table("memory", title, _COLUMNS, [_row(setting) for setting in settings], notes)]
    groups: dict[tuple, dict[str, MemorySetting]] = {}
    for setting in settings:
        if setting.mode == "train":
            # Activations, and so context, precision and attention, are no part of the state.
            key = (setting.size.name, setting.world_size, setting.element_bytes)
            groups.setdefault(key, {}).setdefault(setting.strategy, setting)
    return [*tables, *(_state_table(list(of_group.values())) for of_group in groups.values())]


def _state_table(settings: Sequence[MemorySetting]) -> Table:
    """Ideal shares of one model on one number of ranks, strategy by strategy."""
    first = settings[0]
    answers = [
        answer
        for setting in settings
        for answer in state_answers(
            setting.size,
            setting.world_size,
            setting.strategy,
            element_bytes=setting.element_bytes,
            compute_bytes=ELEMENT_BYTES[setting.precision],
        )
    ]
    ranks = f"{first.world_size} rank{'s' * (first.world_size != 1)}"
    return answers_table("state", f"Ideal shares of training state: {first.size.name}, {ranks}", answers, _STATE_NOTES)


_STATE_NOTES = (
    "Ideal shares: optimizer-state sharding gives whole parameters to ranks, and fsdp cuts matrices by rows and keeps "
    "norms whole, so the fullest rank, in the table above, can hold slightly more.",
)


def _batch_words(setting: MemorySetting) -> str:
    return f"batch {setting.size.batch_size}, {setting.attention} attention"


def _row(setting: MemorySetting) -> dict:
    memory, size = setting.memory, setting.size
    row = {
        "size": size.name,
        "parameters": count_parameters(size),
        "context": size.context,
        "precision": setting.precision,
        "mode": setting.mode,
        "world_size": setting.world_size,
        "strategy": setting.strategy,
        "parameters_gib": memory.state.parameters / GIB,
        "activations_gib": memory.peak.activations_gib,
        "peak_gib": memory.peak.total_gib,
        "moment": memory.peak.moment,
    }
    if memory.state.master_parameters:
        row["master_parameters_gib"] = memory.state.master_parameters / GIB
    if setting.mode != "forward":
        row["gradients_gib"] = memory.state.gradients / GIB
    if setting.mode == "train":
        row |= {
            "optimizer_state_gib": memory.state.optimizer_state / GIB,
            "after_initialization_gib": memory.after_initialization / GIB,
            "before_first_step_gib": memory.before_first_step / GIB,
            "first_peak_gib": memory.first_peak / GIB,
            "after_first_step_gib": memory.state.total / GIB,
        }
    return row
