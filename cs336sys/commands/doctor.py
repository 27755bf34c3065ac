"""``cs336sys doctor``: what this machine has and lacks."""

from dataclasses import asdict

import typer

from cs336sys.commands.output_options import OutputOptions
from cs336sys.errors import CapabilityError


def doctor(output: OutputOptions = OutputOptions()) -> None:
    """Check GPU, driver, versions, links, clocks, profilers and disk, and say how to fix what is wrong.

    Exits with 3 when something is missing that cs336sys cannot do without. A machine without a GPU is no such case.

    cs336sys doctor --format json
    """
    from cs336sys.report.tables import Column, Table

    output.check()

    from cs336sys.measure.diagnosis import diagnose

    checks = diagnose()
    verdicts = [check.verdict for check in checks]
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in ("ok", "warn", "missing"))
    columns = (
        Column("name", "check"),
        Column("verdict", "verdict"),
        Column("found", "found"),
        Column("fix", "fix"),
    )
    table = Table("doctor", f"What cs336sys finds here: {counts}", columns, [asdict(check) for check in checks])
    output.emit([table])
    if "missing" in verdicts:
        raise typer.Exit(CapabilityError.exit_code)
