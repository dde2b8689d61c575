"""A node: `carpool worker --repository DIR --room N`. It starts and stops worker processes as is wanted.

    Redis --snapshot--> decisions --plan--> node --orders--> seat processes, each a worker of one model

main            from settings to a node, until a signal
node            a turn: hold the seats, decide, start and stop processes
seat_process    a process of a seat, as its node sees it
seat            that process itself
decisions       what a node does next, as a function of a snapshot
"""
