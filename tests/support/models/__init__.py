"""Models for tests: each does one thing that a real one may do, on demand. Workers load them by file."""
