"""What runs in a model process: one model, isolated from Redis and from the worker's threads.

    main      the loop: receive a frame, execute it, send the outcome
    frames    what crosses the process boundary
    executor  runs the model on a frame's items and isolates the failures
    model     a user's model, adapted to one interface
    loader    from a model's name on the command line to the model

`frames` is the boundary, shared by both processes. Beside it the worker imports only `loader`, for the
model's name.
"""
