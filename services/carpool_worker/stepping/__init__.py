"""The replica of a stepping model: requests that it has for as long as they are generated.

replica    the loop: moves requests between Redis and the model process
execution  a request in its hands: what of it was emitted, written and read
writer     writes the chunks and results of all requests, in one script
log        what was done, once a second
"""
