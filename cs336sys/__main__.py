"""``python -m cs336sys`` is the same command as ``cs336sys``."""

import os
import sys

# Python puts the working folder first on the path. A random.py or socket.py there would stand in for Python's own, so
# it comes last, unless this program itself is run from it.
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if __name__ == "__main__" and not sys.flags.safe_path and os.path.abspath(sys.path[0]) != _HERE:
    sys.path.append(sys.path.pop(0))

from cs336sys.cli import main  # noqa: E402  # after the path is set

if __name__ == "__main__":
    main()
