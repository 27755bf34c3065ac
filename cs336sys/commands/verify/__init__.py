"""Is somebody's parallel training the same training as one process? Every case is run both ways and compared.

- ``cases.py``: what happens in a case, and which model and batch does it train?
- ``wraps.py``: how is a user's wrap called, and what does it give back?
- ``program.py``: what are the steps of a case, and how far does rounding alone take them in one process?
- ``record.py``: what is kept of them?
- ``rank.py``: what does a rank do in a case, and how is it saved and loaded into new objects?
- ``comparison.py``: what is off, first and by how much?
- ``diagnosis.py``: what does that mean? Of gradients, ``gradient_diagnosis.py``, which knows the causes.
- ``measurement.py``: one cell of ``verify``, from its settings to its outcome.
- ``library.py``: the same for a test in somebody's repository.
"""
