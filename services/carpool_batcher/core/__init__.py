"""The decisions of the batcher: no Redis, no clock, no threads, no logging. See `core.scheduler`."""
