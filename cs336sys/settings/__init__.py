"""The settings of one cell: plain data, no torch."""
