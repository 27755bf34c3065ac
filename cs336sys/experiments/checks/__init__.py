"""Whether what is about to be timed trains what it should: checked against the same training done plainly."""
