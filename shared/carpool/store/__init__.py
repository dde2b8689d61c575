"""What services and commands do in Redis, and the connections that producers use too.

What changes requests, batches, results or leases is one script, or one command, on one hash slot: it takes
effect completely or not at all. (Registering a model and reading its state are several commands.) After a
LinkError the caller does not know whether its command took effect. It repeats it, which does no harm, or
reads the state. A batch whose fetch was lost that way is reclaimed when its lease ends.

    connection  blocking connections to Redis, and how scripts are run
    async_link  those of asyncio producers
    arguments   how lists are passed to scripts
    directory   which models there are, and their state; writes only an operator's overrides of settings
    batcher     lease, dispatch, refuse, and what a batcher reads
    worker      register, fetch, renew, reclaim, commit
    results     how a result gets to its producer: what batchers and workers both write
    lua/        the scripts, each with its KEYS, ARGV, reply and complexity
"""
