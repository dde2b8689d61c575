"""What generates step by step in a model process.

    loop        takes what the worker sent, advances, sends what changed
    frames      what crosses the process boundary
    stepper     begins and steps requests, and isolates the failures
    slots       which requests wait, which have a slot, which take part in the next step
    generation  a request: what it has emitted, what of that was sent
    requests    what the model sees of a request; generator functions as models
    chunks      emitted values as one

The other side is the worker's `stepping`.
"""
