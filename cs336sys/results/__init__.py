"""What was measured: one schema, the file it is kept in, and what two files tell apart. Plain data, no torch."""
