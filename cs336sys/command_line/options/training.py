"""Options that commands share: of the model and its training.

A command has whole groups of them: each class below is a group, and a command's parameter of that class stands for all
of its options (see :func:`cs336sys.command_line.options.reading.with_read_options`). Options of settings follow from
the fields of workloads.
"""

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, dataclass, replace
from inspect import get_annotations
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

from cs336sys.accounting.flops import count_parameters
from cs336sys.command_line.options.reading import choice, name_or_code, one_of, read_function, runs_code, setting
from cs336sys.errors import DEBUG_VARIABLE, UsageError
from cs336sys.settings.course_package import course_package, set_aside_others
from cs336sys.settings.fields import MEASURING, MODEL, WHAT_RUNS, Configured
from cs336sys.settings.sizes import SIZES, ModelSize, choose_size
from cs336sys.settings.training import COMPARED_SETTINGS, UserCode, Workload
from cs336sys.settings.user_code import digest, is_user_code


def option_of(owner: type[Configured], name: str, **changes: Any) -> Any:
    """Declare the option of a setting as its field describes it, but for ``changes`` of the declaration (``help``)."""
    described = owner.settings()[name]
    declared = {"help": described.help or None, "rich_help_panel": described.panel or None} | changes
    if described.shown_default:
        declared["show_default"] = described.shown_default
    if described.takes_code:
        return name_or_code(described.choices, **declared) if described.choices else runs_code(**declared)
    if described.choices:
        return choice(described.choices, parser=described.parse or one_of(described.choices), **declared)
    names = [f"{described.flag}/{described.off or f'--no-{described.flag[2:]}'}"] if described.type is bool else []
    return setting(*names, **{"min": described.minimum, "max": described.maximum, "parser": described.parse} | declared)


class OptionGroup:
    """Options of settings; each is an attribute that :func:`setting_options` adds."""

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

        def __init__(self, *values: Any, **named: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

    def combinations(self, owner: type[Configured], *order: str, **values: Any) -> list[dict[str, Any]]:
        """Return every combination of the options' values, as fields of a workload (:meth:`Configured.combinations`).

        Args:
            order: fields, the one first that changes slowest; others come after them.
            values: of fields without options here, or instead of options' values; fields with neither keep defaults.
        """
        option_of_field = {name: described.option or name for name, described in owner.direct_settings().items()}
        chosen = {name: getattr(self, option) for name, option in option_of_field.items() if hasattr(self, option)}
        chosen |= values
        return owner.combinations({name: chosen[name] for name in (*order, *option_of_field) if name in chosen})


Group = TypeVar("Group", bound=OptionGroup)


def setting_options(owner: type[Configured], *names: str, **changes: Any) -> Callable[[type[Group]], type[Group]]:
    """Add the options of settings to a class, in this order, and make it a dataclass.

    Defaults are attributes of the class, or else those of the settings.

    Args:
        names: of the settings, or of options that the class declares itself, or a base that is not made a dataclass.
        changes: of the declarations, as of :func:`option_of`.
    """

    def add(group: type[Group]) -> type[Group]:
        """Declare a field for each option, with its type and default, before the others of the class, as in help."""
        declared = {name: kind for base in group.__mro__ for name, kind in get_annotations(base).items()}
        annotations: dict[str, Any] = {}
        for name in names:
            if name in declared:
                annotations[name] = declared[name]  # An option of the class itself: ``names`` gives its place alone.
                continue
            described = owner.settings()[name]
            option = described.option or name
            # A setting may have another default as an option; None: the model's size decides, or it has no default.
            default = described.default if described.option_default is None else described.option_default
            default = None if described.is_by_size or default is MISSING else default
            kind: Any = described.type | None if described.is_by_size else described.type
            if described.several:  # A list of values, each of which makes cells.
                kind, default = Sequence[described.type], () if default is None else (default,)  # type: ignore[name-defined]
            annotations[option] = Annotated[kind, option_of(owner, name, **changes)]
            setattr(group, option, vars(group).get(option, default))  # The class's own default, if it has one.
        group.__annotations__ = annotations | group.__annotations__  # These first: a dataclass's fields are in order.
        return dataclass(frozen=True)(group)

    return add


_SIZES = ", ".join(
    f"{name} {count / 1e9:.1f}B" if count >= 1e9 else f"{name} {count / 1e6:.0f}M"
    for name, count in zip(SIZES, map(count_parameters, SIZES.values()), strict=True)
)

ModesOption = Annotated[list[str], option_of(Workload, "mode")]
DeviceOption = Annotated[str, option_of(Workload, "device")]
ForceOption = Annotated[
    bool, setting("--force", help="Run cells that main memory is too small for.", rich_help_panel=MEASURING)
]
DryRunOption = Annotated[
    bool, setting("--dry-run", help="Only print the cells and their predicted memory.", rich_help_panel=MEASURING)
]


@setting_options(
    ModelSize, *("size", "context", "batch_size", "vocab_size", "d_model", "d_ff", "num_layers", "num_heads")
)
class SizeOptions(OptionGroup):
    """Options for the Transformer's sizes, and their batches."""

    size: Annotated[Sequence[str], choice(SIZES, f"{_SIZES}.", rich_help_panel=MODEL)] = ()

    def sizes(self) -> list[ModelSize]:
        """Return every combination of sizes, contexts and batch sizes; where none is given, with the size's own."""
        shape = {name: getattr(self, name) for name in ("vocab_size", "d_model", "d_ff", "num_layers", "num_heads")}
        return [
            choose_size(name, context=context, batch_size=batch_size, **shape)
            for name, context, batch_size in product(self.size, self.context or (None,), self.batch_size or (None,))
        ]


@setting_options(UserCode, *UserCode.in_panel(MODEL))
class UserCodeOptions(OptionGroup):
    """Options for a user's model."""

    debug: Annotated[
        bool, setting("--debug", help="Print tracebacks of your code and of lost ranks.", rich_help_panel=MODEL)
    ] = False


@setting_options(Workload, "precision", help="fp32, bf16, fp16 (autocast). Default: by size.")
class PrecisionOptions(OptionGroup):
    """Options for precisions."""

    bf16: Annotated[bool, setting("--bf16", help="Short for --precision bf16.", rich_help_panel=WHAT_RUNS)] = False
    fp16: Annotated[bool, setting("--fp16", help="Short for --precision fp16.", rich_help_panel=WHAT_RUNS)] = False

    def precisions(self) -> Sequence[str] | Sequence[None]:
        """Return the requested precisions, or None for the size's own; a UsageError if two options name them."""
        if bool(self.precision) + self.bf16 + self.fp16 > 1:
            raise UsageError("--precision, --bf16 and --fp16: give one of them (--precision bf16,fp16 runs both)")
        return ["bf16"] if self.bf16 else ["fp16"] if self.fp16 else self.precision or [None]


@setting_options(Workload, *COMPARED_SETTINGS[1:])  # All but the first, precision, which has options of its own.
class ImplementationOptions(OptionGroup):
    """Options for implementations of the same computation."""


@setting_options(Workload, *Workload.in_panel(MEASURING))
class RunOptions(OptionGroup):
    """The device, and settings of the whole process."""


@setting_options(ModelSize, "size")
class UntimedTrainingOptions(RunOptions, ImplementationOptions, PrecisionOptions, UserCodeOptions, SizeOptions):
    """Options for models that are trained here, sizes or a user's, how they are trained, and on what."""

    size: Annotated[Sequence[str], choice(SIZES, f"{_SIZES}. Default: small; CPU: tiny.", rich_help_panel=MODEL)] = ()

    def workloads(self, modes: Sequence[str] = ("train",), **settings: Any) -> list[Workload]:
        """Return all combinations of list options, in their order, with these ``settings``; or raise a UsageError."""
        if self.model is not None:
            set_aside_others()  # A cs336_basics next to a user's model is the user's: this program need not train it.
        course_package().require_needed()
        if self.debug:
            os.environ[DEBUG_VARIABLE] = "1"  # Read by the processes that measure.
        precisions = self.precisions()  # None: the size's own.
        has_gpu = self.device != "cpu" and shutil.which("nvidia-smi") is not None  # torch is not imported here
        sizes = (self if self.size else replace(self, size=["small" if has_gpu else "tiny"])).sizes()
        user = self._user_code()
        return [
            Workload(size, **cell, user=user)
            for size in sizes
            for cell in self.combinations(
                Workload, mode=modes, precision=[chosen or size.precision for chosen in precisions], **settings
            )
        ]

    def _user_code(self) -> UserCode:
        """Return the user's functions, with one digest of the files of all of them, optimizers included."""
        references = {"model": self.model, "loss": self.loss, "batch": self.batch}
        for option, reference in references.items():
            if reference is not None:
                try:
                    read_function(reference)  # Refuses a file without that name; nothing is run.
                except UsageError as error:
                    raise UsageError(f"--{option} {error}") from error
        names = [name for name in (*references.values(), *self.optimizer) if name and is_user_code(name)]
        return UserCode(**references, blocks=self.blocks, code_digest=digest(names) if names else None)


@setting_options(Workload, "warmup", "steps", rich_help_panel=MEASURING)
class TrainingOptions(UntimedTrainingOptions):
    """Options for models that are trained here, and for the number of steps."""
