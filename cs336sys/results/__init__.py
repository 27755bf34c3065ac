"""Measurements: one schema, the file they are kept in, and comparisons of two files. Plain data, no torch."""
