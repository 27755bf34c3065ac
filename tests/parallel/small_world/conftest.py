"""The trainers, of one process and of ranks, are those of the random programs."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "random_training"))
