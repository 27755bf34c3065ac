"""Every command with its options, and workers that commands leave to each other."""

from kept_workers import every_command, fresh_workers, kept_workers  # noqa: F401
