"""What tables and pictures raise of cells that another version, or another program, has written."""

FAULTS = (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RecursionError, StopIteration)


def fault_words(error: Exception) -> str:
    """What the cells do, after their name: ``lack 'timeline'``."""
    return f"lack {error}" if isinstance(error, KeyError) else f"hold something else than expected ({error})"
