"""Bytes <-> messages: no I/O, no clock. Each module rejects what is malformed; only `requests` also applies
a model's settings (limits, deadlines). It does not look into a body: the worker decodes that, by `bodies`.

requests          an entry of the request stream <-> requests, withdrawals and refusals
request_fields    the fields of a request, read and checked one by one
batches           a batch entry, a settled entry, a dead letter
results           the envelopes that carry results
bodies            the body of a request or a result <-> Python values
tensors           tensors in bodies
registration      what a worker registers about its model
report            what an active batcher publishes about itself
"""
