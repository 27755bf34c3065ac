"""Check that a step trains correctly before it is timed, by training the same plainly."""
