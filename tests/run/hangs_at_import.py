"""A measurement whose module is not imported within any time, as from a file system that does not answer."""

import time

time.sleep(60)
