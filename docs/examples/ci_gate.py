"""Fail a pull request that makes training slower: measure two revisions in turn, and let ``compare`` decide.

    python ci_gate.py BASE_CHECKOUT NEW_CHECKOUT [bench options]

Each revision runs four times, alternating, so a machine that slows down slows both. ``compare`` counts a run as one
sample and ends with exit code 1 if the new revision is significantly slower by more than 5 %.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

RUNS = 4


def measure(checkout: Path, options: list[str], file: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    command = [sys.executable, "-m", "cs336sys", "bench", *options, "--save", str(file)]
    subprocess.run(command, env=environment, cwd=checkout, check=True, stdout=subprocess.DEVNULL)


def main() -> int:
    base, new = (Path(argument).resolve() for argument in sys.argv[1:3])
    options = sys.argv[3:] or ["--size", "tiny", "--steps", "20"]
    with tempfile.TemporaryDirectory() as folder:
        files = {checkout: [Path(folder, f"{place}-{run}.jsonl") for run in range(RUNS)]
                 for place, checkout in enumerate((base, new))}  # fmt: skip
        for run in range(RUNS):
            for checkout in (base, new):
                measure(checkout, options, files[checkout][run])
        sides = [",".join(map(str, files[checkout])) for checkout in (base, new)]
        return subprocess.run([sys.executable, "-m", "cs336sys", "compare", *sides, "--fail-above", "5%"]).returncode


if __name__ == "__main__":
    sys.exit(main())
