"""The handouts' questions that arithmetic answers: rows of value, formula and reason, built on ``accounting``."""
