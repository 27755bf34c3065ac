"""Plan which parameters FSDP shards, and which are gathered together, without moving any data.

A layer is sharded if it owns a parameter of two or more dimensions: ``Linear``, ``Embedding`` and the like, whoever
wrote them; its bias goes with it. Norms and other small parameters are replicated.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from torch import nn

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # Modules that are never called themselves; only their children are.


@dataclass(eq=False)
class PlannedParameter:
    """One parameter and everywhere it is used.

    Attributes:
        names: its names in the whole module; tied weights have several.
        owners: the modules that hold it, each with the attribute that it is held as.
    """

    names: list[str] = field(default_factory=list)
    owners: list[tuple[nn.Module, str]] = field(default_factory=list)

    @property
    def held(self) -> nn.Parameter:
        """Return the parameter that the modules hold: the whole one at first; once it is sharded, this rank's slice."""
        owner, attribute = self.owners[0]
        parameter = owner._parameters[attribute]
        assert parameter is not None
        return parameter


@dataclass(eq=False)
class PlannedUnit:
    """Modules whose weights are gathered when one of them is called, and freed when it returns.

    Attributes:
        name: the name of its first module.
        modules: usually one; modules that share weights form one unit.
        contains_units: whether one of its modules contains a module of another unit.
    """

    name: str
    modules: list[nn.Module]
    sharded: list[PlannedParameter] = field(default_factory=list)
    contains_units: bool = field(init=False)


@dataclass
class ShardingPlan:
    """All parameters of a module, each either in one unit or replicated.

    Attributes:
        units: in the order of the module's children.
        replicated: parameters that every rank holds whole.
    """

    units: list[PlannedUnit]
    replicated: list[PlannedParameter]

    @property
    def all_sharded(self) -> list[PlannedParameter]:
        return [entry for unit in self.units for entry in unit.sharded]


def plan_sharding(module: nn.Module, unit_modules: Collection[nn.Module] | None = None) -> ShardingPlan:
    """Divide the parameters of a module into units.

    Args:
        unit_modules: modules that each become a unit. By default these are the modules in an ``nn.ModuleList``, which
            are the blocks of a Transformer; a list within such a module is part of its unit. Every sharded layer
            outside of them is a unit of its own. A layer with children (for example attention that passes its output
            projection's weight to a function) forms one unit with those of them that are not units themselves.
    """
    roots: dict[nn.Module, PlannedUnit] = {}
    # The units that each module is called in; None stands for a call outside of all units.
    homes: dict[nn.Module, set[PlannedUnit | None]] = {}

    def visit(child: nn.Module, name: str, home: PlannedUnit | None, in_list: bool, in_block: bool) -> None:
        """Note that a module is called in ``home``, or make it a unit of its own; then visit its children."""
        is_block = in_list and not in_block and not isinstance(child, _CONTAINERS)
        if unit_modules is not None:
            is_block = child in unit_modules
        if is_block or (home is None and _owns_matrix(child)):  # A block, or a sharded layer outside of all blocks.
            home = roots.setdefault(child, PlannedUnit(name, [child]))
        # A module may be a child of several; its own children are visited once for each unit that it is called in.
        if home in homes.setdefault(child, set()):
            return
        homes[child].add(home)
        for attribute, grandchild in child.named_children():
            child_name = f"{name}.{attribute}" if name else attribute
            visit(grandchild, child_name, home, isinstance(child, nn.ModuleList), in_block or is_block)

    visit(module, name="", home=None, in_list=False, in_block=False)
    units = list(roots.values())
    order = {unit: position for position, unit in enumerate(units)}
    sharded, replicated = [], []
    for entry in _module_parameters(module):
        # A module outside of all units may hold it, too, and gets it whole when it uses it.
        used_in = {unit for owner, _ in entry.owners for unit in homes[owner] if unit is not None}
        can_be_cut = entry.held.dim() > 0 and entry.held.numel() > 0
        if not (can_be_cut and used_in and any(_owns_matrix(owner) for owner, _ in entry.owners)):
            replicated.append(entry)
        else:
            sharded.append(entry)
            # Units that share a weight become one, in the place of the first.
            first, *others = sorted(used_in, key=order.__getitem__)
            for other in others:
                first.modules += other.modules
                units.remove(other)
                homes = {part: {first if home is other else home for home in used} for part, used in homes.items()}

    # After all units that share something were united, each weight is in one.
    for entry in sharded:
        unit = next(unit for owner, _ in entry.owners for unit in homes[owner] if unit is not None)
        unit.sharded.append(entry)
    unit_of = {module: unit for unit in units for module in unit.modules}
    for unit in units:
        inside = (part for module in unit.modules for part in module.modules())
        unit.contains_units = any(unit_of.get(part, unit) is not unit for part in inside)
    # A unit of a user's choice, or of norms alone, may have nothing to gather.
    return ShardingPlan([unit for unit in units if unit.sharded], replicated)


def _owns_matrix(module: nn.Module) -> bool:
    return any(parameter is not None and parameter.dim() >= 2 for parameter in module._parameters.values())


def _module_parameters(module: nn.Module) -> list[PlannedParameter]:
    """List the parameters of a module, each once, with all names and owners."""
    planned: dict[nn.Parameter, PlannedParameter] = {}
    for name, owner in module.named_modules(remove_duplicate=False):
        for attribute, parameter in owner._parameters.items():
            if parameter is not None:
                entry = planned.setdefault(parameter, PlannedParameter())
                entry.names.append(f"{name}.{attribute}" if name else attribute)
                if (owner, attribute) not in entry.owners:
                    entry.owners.append((owner, attribute))
    return list(planned.values())
