"""One file for each system. They run in the system's own environment; only `catalog` is imported by the
bench."""
