"""Requests, batches, results and what is told of them. Data only, no I/O.

Times are integers in microseconds (`_us`) or milliseconds (`_ms`) on Redis's clock: an entry's ID begins with
the millisecond at which Redis accepted it, and no other host's clock decides anything.
"""
