"""Bytes <-> messages: no I/O, no clock. Each module rejects what is malformed; only `requests`, `columns` and
`runs` also apply a model's settings (limits, deadlines). They do not look into a body: the worker decodes
that, by `bodies`.

requests          an entry of the request stream -> runs, withdrawals and refusals
columns           columns -> runs
put_back          runs <-> the entry of requests that are put back
runs              fields -> runs: what an ordinary request and columns have in common
request_fields    the fields of a request, read and checked one by one
sequence_fields   those that make a request a part of a sequence
field_hints       fields and content types that look misspelt
content_types     which content types mean what
batches           a batch entry, a settled entry, a dead letter
inbox             the messages to a process of a bound model
results           the envelopes that carry results
bodies            the body of a request or a result <-> Python values
json_rules        what JSON texts must keep to, so that all read the same value
values            values of other libraries in bodies: converted, or refused by name
tensors           tensors in bodies
padding           tensors of several sizes as tensors of one
registration      what a worker registers about its model
report            what an active batcher publishes about itself
detail            what it publishes beside that while somebody looks
whereabouts       where a request is: a question, its answer, and what that means
orders            what operators have ordered of a model: it is paused, workers drain
audit             what operators did
traffic           shares of a model's traffic by version
nodes             what nodes share: what is wanted, who has which seat, reports
statistics        what became of a model's requests, as scripts count it
"""
