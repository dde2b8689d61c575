"""What services do in Redis: the moves of batcher and worker, over one connection to one model's keys.

Each move is one script on one hash slot and takes effect wholly or not at all. Each is idempotent, because a
lost reply (LinkError) leaves the caller only one thing to do: say it again, or look.

    directory   what anybody may look at: which models there are, and how they fare
    batcher     lease, dispatch, refuse, and what a batcher reads
    worker      register, fetch, renew, reclaim, commit
    delivery    how a result gets to its producer: what both of them write
"""
