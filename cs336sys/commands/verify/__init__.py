"""Is somebody's parallel training the same training as one process? Every case is run both ways and compared."""
