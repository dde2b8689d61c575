"""Bytes <-> messages: no I/O, no clock. Only `requests` decides: what is invalid, and each deadline.

requests          an entry of the request stream <-> requests, withdrawals and refusals
request_fields    the fields of a request, read and checked one by one
batches           a batch entry, a settled entry, a dead letter
results           the envelopes that carry results
bodies            the body of a request or a result <-> Python values
tensors           tensors in bodies
registration      what a worker registers about its model
report            what an active batcher publishes about itself
"""
