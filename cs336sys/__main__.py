"""``python -m cs336sys`` is the same command as ``cs336sys``."""

from cs336sys.cli import main

if __name__ == "__main__":
    main()
