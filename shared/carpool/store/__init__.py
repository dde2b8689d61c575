"""What services do in Redis, over one connection to the keys of one model.

Each operation is one script on one hash slot, and takes effect completely or not at all. Each is idempotent:
after a LinkError the caller does not know whether its command took effect, and repeats it or reads the state.

    connection  connections to Redis, and how scripts are run
    arguments   how lists are passed to scripts
    directory   what can be read without taking part: which models there are, and their state
    batcher     lease, dispatch, refuse, and what a batcher reads
    worker      register, fetch, renew, reclaim, commit
    results     how a result gets to its producer: what batchers and workers both write
    lua/        the scripts, each with its KEYS, ARGV, reply and complexity
"""
