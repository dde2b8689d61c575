"""Bytes <-> messages, and nothing else: no I/O, no clock, no decisions.

requests      an entry of the request stream <-> requests, withdrawals and refusals
batches       a batch entry, a settled entry, a dead letter
results       the envelopes that carry results
bodies        a request's or result's body <-> Python values
tensors       tensors in bodies
"""
