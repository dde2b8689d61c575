"""The replica of a stepping model: requests that it has for as long as they are generated.

    replica    the loop: moves requests between Redis and the model process
    in_hand    all requests in its hands, and the settings for them
    execution  one of them: what of it was emitted, written and read
    writer     writes the chunks and results of all, in one script
    log        what was done, once a second

The other side is `model_process.stepping`.
"""
