"""The check that parallel training is the same training as one process: every case is run both ways and compared."""
