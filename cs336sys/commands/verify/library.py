"""``cs336sys.verify(...)``: the cases of ``cs336sys verify`` in a test of somebody's repository."""

from collections.abc import Collection
from dataclasses import dataclass

from cs336sys.commands.verify.measure import measure_case
from cs336sys.errors import SENTENCES, require_known
from cs336sys.parallel.ranks import launch
from cs336sys.settings.sizes import choose_size
from cs336sys.settings.training import UserCode, Workload
from cs336sys.settings.verification import CASES, SEQUENCES, SMALL, WRAPS, VerifiedWorkload


@dataclass(frozen=True)
class VerifiedCase:
    """One case.

    Attributes:
        verdict: ``ok``, ``wrong``, ``refused`` or ``does not apply``.
        cause: what is wrong, a word or two of ``docs/verify.md``; empty where nothing is.
        line: of the wrap that is to blame, ``mine.py, line 12``.
        reason: why it is wrong or refused, in a sentence; empty where it is ``ok``.
        not_compared: what the case could not look at; empty where it compared everything.
    """

    name: str
    verdict: str
    cause: str = ""
    line: str = ""
    reason: str = ""
    not_compared: str = ""


@dataclass(frozen=True)
class Verification:
    """All cases of a wrap.

    Attributes:
        cases: in their order, by name.
    """

    cases: dict[str, VerifiedCase]

    @property
    def ok(self) -> bool:
        """Return whether nothing is wrong, and some case is ``ok``."""
        verdicts = {case.verdict for case in self.cases.values()}
        return "wrong" not in verdicts and "ok" in verdicts

    @property
    def report(self) -> str:
        """Return a line for each case."""
        lines = []
        for case in self.cases.values():
            diagnosis = ", ".join(filter(None, (case.cause, case.line)))
            unseen = case.not_compared and f"(not compared: {case.not_compared})"
            parts = f"{case.name}: {case.verdict}", diagnosis and f"({diagnosis})", case.reason, unseen
            lines.append(" ".join(filter(None, parts)))
        return "\n".join(lines)


def verify(
    wrap: str,
    *,
    model: str | None = None,
    loss: str | None = None,
    batch: str | None = None,
    blocks: str | None = None,
    world_size: int = 2,
    cases: Collection[str] | None = None,
    mesh: str | None = None,
    gradients: str = "mean",
    finish: str | None = None,
    device: str = "auto",
    seed: int = 0,
    timeout_s: float = 20.0,
) -> Verification:
    """Train in parallel and in one process, and compare; as ``cs336sys verify`` with the same options.

    Starts ``world_size`` processes, so a script calls it under ``if __name__ == "__main__"``.

    Args:
        wrap: ``FILE.py:NAME``, ``package.module:NAME``, or the name of a ready wrap.
        model, loss, batch, blocks: as of every command that trains; None is a small Transformer of ours.
        cases: names of ``docs/verify.md``; None is all.
        timeout_s: how long ranks wait for each other before that counts as a hang.

    Raises:
        UsageError: settings do not go together.
        CapabilityError: the machine lacks what is asked for.
        UserCodeError: the model or its loss fails in one process.
    """
    for name in cases or ():
        require_known("case", name, CASES)
    cases = CASES if cases is None else cases
    user = UserCode(model=model, loss=loss, batch=batch, blocks=blocks)
    verifications = {}
    try:
        size = choose_size("tiny", batch_size=SEQUENCES * world_size, **SMALL)
        training = Workload(size, device=device, seed=seed, user=user)
        mesh = mesh or WRAPS.get(wrap, "data")  # WRAPS has the ready ones; a user's is taken for data-parallel.
        for name in cases:
            workload = VerifiedWorkload(
                training, wrap, world_size, name, mesh, gradients=gradients, finish=finish, timeout_s=timeout_s
            )
            outcome = measure_case(workload.configuration(), lambda stage: None)
            columns = {key: str(outcome.derived.get(key) or "") for key in ("cause", "line", "not_compared")}
            verdict = str(outcome.derived.get("verdict") or outcome.status)
            verifications[name] = VerifiedCase(name, verdict, reason=outcome.reason or "", **columns)
    except SENTENCES as error:
        raise error.with_traceback(None) from None  # Without the frames of the measurement.
    finally:
        launch.end_kept()
    return Verification(verifications)
