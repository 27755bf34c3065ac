"""Attention by itself: what is compared, with what, and how it is timed (``measure``)."""
