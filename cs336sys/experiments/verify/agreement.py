"""Cases that compare ranks with each other, or with a rank alone, rather than numbers with those of one process."""

from collections.abc import Mapping, Sequence

import torch

from cs336sys.experiments.verify.cases import Program
from cs336sys.experiments.verify.rank import RankReport
from cs336sys.experiments.verify.record import OptimizerSpec
from cs336sys.parity.causes import Diagnosis
from cs336sys.parity.collectives import first_disagreement
from cs336sys.workload.verification import VerifiedWorkload

# Programs of which one rank alone meets a condition, and what that is.
CONDITIONS = {
    "no condition": Program(steps=2),
    "a parameter that one rank does not use": Program(steps=2, unused=True),
    "an overflow on one rank": Program(steps=2, scale=True),
    "fewer sequences on one rank": Program(steps=2, uneven=True),
}


def diagnose_masks(workload: VerifiedWorkload, reports: Sequence[RankReport]) -> Diagnosis | None:
    """Say which ranks' dropout masks should be alike, or should not be."""
    by_data: dict[int, list[torch.Tensor]] = {}
    for rank, report in enumerate(reports):
        assert report.masks is not None
        by_data.setdefault(workload.data_place(rank), []).append(report.masks)
    pairs = [(mask, masks[0]) for masks in by_data.values() for mask in masks]
    firsts = [masks[0] for masks in by_data.values()]
    if any(mask.shape == other.shape and not torch.equal(mask, other) for mask, other in pairs):
        return Diagnosis("dropout", "ranks that share sequences drop different elements of them: seed them alike")
    if any(torch.equal(mask, firsts[0]) for mask in firsts[1:]):
        reason = "every rank drops the same elements of its own sequences: seed each rank by its number"
        return Diagnosis("dropout", reason)
    return None


def diagnose_order(reports_of: Mapping[str, Sequence[RankReport]]) -> Diagnosis | None:
    """Say under which of :data:`CONDITIONS` ranks launch different collectives."""
    for condition, reports in reports_of.items():
        launches = [[launch for launch in report.launches if launch.phase != "wrap"] for report in reports]
        if (difference := first_disagreement(launches)) is not None:
            launch = difference.launch
            meaning = f"with {condition}, {difference.meaning}; all must launch the same, even where nothing hangs"
            return Diagnosis("order", meaning, None, launch.description, launch.line)
    return None


def merged_spec(reports: Sequence[RankReport]) -> OptimizerSpec | None:
    """The wrap's optimizer with the settings of every rank's parameters; None where the wrap has none."""
    specs = [report.optimizer for report in reports if report.optimizer is not None]
    settings = {name: values for spec in reversed(specs) for name, values in spec.settings.items()}
    return OptimizerSpec(specs[0].optimizer_class, settings) if specs else None


def diagnose_groups(
    reports: Sequence[RankReport], in_one_process: RankReport, shapes: Mapping[str, torch.Size]
) -> Diagnosis | None:
    """Say which parameter has other settings of the optimizer than the same wrap gives it on one rank.

    Args:
        shapes: of the model's parameters.
    """
    spec, expected = merged_spec(reports), in_one_process.optimizer
    assert spec is not None
    seen = {name: shape for report in reports for name, shape in report.optimizer_shapes.items()}
    for name, (_, settings) in spec.settings.items():
        _, right = (None, {}) if expected is None else expected.settings.get(name, (None, {}))
        differing = [key for key in settings if key in right and right[key] != settings[key]]
        if differing:
            key = differing[0]
            meaning = (
                f"{name} has {key} {settings[key]} on ranks and {right[key]} in one process: the optimizer sees "
                f"{_shape(seen.get(name))} where the model has {_shape(shapes[name])}"
            )
            return Diagnosis("groups", meaning)
    flattened = [name for name, shape in seen.items() if len(shape) < 2 <= len(shapes[name])]
    used = [settings for _, settings in spec.settings.values()]
    unused = [settings for settings in reports[0].empty_groups if settings not in used]
    if flattened and unused and all(report.empty_groups == reports[0].empty_groups for report in reports):
        keys = [key for key, value in unused[0].items() if spec.settings[flattened[0]][1].get(key) != value]
        group = ", ".join(f"{key} {unused[0][key]}" for key in keys)
        meaning = (
            f"the optimizer's group of {group} is empty, and all {len(flattened)} matrices are in another, as the "
            f"optimizer sees flattened slices: {flattened[0]} of {_shape(shapes[flattened[0]])} as "
            f"{_shape(seen[flattened[0]])}; group parameters before they are cut"
        )
        return Diagnosis("groups", meaning)
    return None


def _shape(shape: torch.Size | None) -> str:
    return "no such parameter" if shape is None else f"({', '.join(map(str, shape))})"
