"""Processes that run a function as the ranks of one process group."""
