"""The batcher's decisions, without Redis, clock, threads or logging. The rules stand in `core.scheduler`.

Why: docs/decisions/0009.
"""
