"""A whole stack on one machine, under one supervisor: Redis if none is given, a batcher, and workers."""
