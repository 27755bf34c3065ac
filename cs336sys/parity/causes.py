"""The causes that a difference from one process may have."""

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Diagnosis:
    """Diagnosis of a fault.

    Attributes:
        cause: one word or two for programs, one of :data:`CAUSES`.
        meaning: a sentence for people.
        ratio: of what was found to what is right; None where they are not in proportion.
        collective: the one that is missing, early, or that others do not launch; empty where none is to blame.
        line: of the user's code: of the collective, else of the wrap.
    """

    cause: str
    meaning: str
    ratio: float | None = None
    collective: str = ""
    line: str = ""
    first: tuple[str, int, str] = ("", 0, "")

    def columns(self) -> dict[str, object]:
        """The fields as derived columns of a cell."""
        columns = asdict(self)
        del columns["first"]
        return columns


# Every cause, with what it is.
CAUSES = {
    "not averaged": "gradients are summed over ranks, and not divided",
    "averaged twice": "gradients are divided once too often",
    "scaled": "gradients are right but for a factor",
    "not synchronized": "each rank keeps its own gradient",
    "not waited for": "a collective was launched, and its result is not used",
    "too early": "a collective was launched before its gradient was complete",
    "one rank's": "every rank has the gradient of one of them",
    "rank left out": "the gradient of a rank is not in the mean",
    "uneven": "ranks with different numbers of sequences count alike",
    "accumulation": "micro-batches are combined wrongly",
    "stale gradient": "the gradient of an earlier step is used, or was not set to zero",
    "mixed up": "a parameter has the gradient of another",
    "left out": "a parameter gets no gradient, or is not in the optimizer",
    "tied": "only a weight that several layers share is wrong",
    "unused": "only right while every rank uses every parameter",
    "frozen": "only right without a frozen parameter",
    "partial sum": "a sum over ranks is missing",
    "forward": "the ranks compute something else",
    "stale weights": "the forward pass computes with weights from before the last step",
    "not broadcast": "ranks start with weights or buffers of their own",
    "wrong slices": "ranks hold other slices than they should",
    "clipping": "the norm is not that of all gradients",
    "scaling": "ranks do not agree on overflow",
    "not sent": "ranks do not get the updates that another one made",
    "optimizer": "the update is wrong, with the right gradients",
    "schedule": "the learning rate is another than in one process",
    "groups": "the optimizer groups parameters otherwise than in one process",
    "buffers": "buffers differ",
    "evaluation": "only the evaluation, or what follows one, is wrong",
    "checkpoint": "only wrong with activation checkpoints",
    "compile": "only wrong with compiled blocks",
    "resume": "only wrong after saving and loading",
    "race": "changes from run to run, or with who is late",
    "dropout": "ranks draw the wrong masks",
    "order": "ranks launch different collectives under a condition that one of them meets",
    "hang": "ranks wait for each other",
    "died": "a rank was ended",
    "raises": "the wrap raises an error in the plain step",
}
