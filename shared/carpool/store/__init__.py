"""What services and commands do in Redis, and the connections that producers use too.

What changes requests, batches, results or leases is one script, or one command, on one hash slot: it takes
effect completely or not at all. (Registering a model and reading its state are several commands.) After a
LinkError the caller does not know whether its command took effect. It repeats it, which does no harm, or
reads the state. A batch whose fetch was lost that way is reclaimed when its lease ends.

    connection       blocking connections to Redis, and how scripts are run
    async_link       those of asyncio producers
    redis_socket     a socket that is connected to Redis: commands in, replies out
    truncated_replies  replies of which only a limited number of bytes is kept
    link_errors      what goes wrong with a connection or a command, what to do about it, and how it is logged
    server_version   which server Redis is, and whether it is too old
    arguments        how lists, and changes of sequences, are passed to scripts
    batcher          dispatch, refuse, answer ahead, and what a batcher looks up
    reader           what is new in the streams of all models
    upkeep           what a batcher does regularly for all models: leases, snapshots, reports
    worker           register, fetch, renew, reclaim, commit
    steps            what a worker of a stepping model does beside that
    bound            what a worker of a bound model does beside that
    kept             requests that are added once, and whose results are read by ID, for producers
    results          how a result gets to its producer: what batchers and workers both write
    directory        which models there are, and their state; writes only an operator's overrides of settings
    unregistered     what Redis has of models that nobody registered
    declarations     what each worker declares, of which the registration is made
    dead_letters     requests that were given up: read, sent again, dropped
    dead_pages       these without their bodies, in pages
    operations       what an operator does to a model that is served: pause, resume, drain a worker
    workers          the workers of a model: what each has, and whether it drains
    audit            what operators did
    traffic          shares of a model's traffic by version
    overrides        these of settings: checked, written, and what the batcher says of them
    withdrawals      an operator withdraws requests
    nodes            which models of repositories are wanted
    rollouts         a version comes beside others, or in their place: nodes and traffic together
    seats            which node has which model process of these
    detail           what a batcher tells of a model while somebody looks
    whereabouts      where a request is: asks its batcher, and looks
    removal          a model that is no longer served is removed
    eviction         whether Redis may discard what it has accepted
    lua/             the scripts, each with its KEYS, ARGV, reply and complexity

Why: docs/decisions/0002.
"""
