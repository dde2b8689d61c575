"""What runs in a model process: one model, isolated from Redis and from the worker's threads.

    main             loads the model, and starts its loop
    frame_loop       the loop: receive a frame, execute it, send the outcome
    async_loop       the same for an async model: several frames at a time
    calls            what a model asks of other models
    frames           what crosses the process boundary
    frame_execution  from a frame to its outcome
    executor         runs the model on a frame's items and isolates the failures
    costs            what bodies cost, as the model tells, and which are executed together for it
    outputs          what a model returned for a batch: counted, matched, and as it is declared
    states           states of sequences: as a model declares and gets them, and as bytes
    failures         from what the model raised to a status and a detail, or to the end of the process
    broken_devices   which errors say that the accelerator does not work any more in this process
    raised           what the model raised, for the log and for operators
    measured         what the model measures of itself
    spans            traces of executions, and of what the model does
    printed          what the model prints and logs: in the log at once
    model            from a user's model to a loaded one
    loaded           a loaded model: its functions under one interface, and what it declares
    creation         from a model's location to its object, made with what it is given
    loader           from a model's name on the command line to the model
    parameters       which a model declares, and the values for it
    configuration    what a model is loaded with beside its object, as the worker sends it
    stepping         the package for models that generate step by step
    decoding         the package for models that decode bodies, and encode results, beside their batches
    padding          batches that are padded, and results that are cut back
    apart            sets a process apart from what the model does to sockets and signals
    bound_executor   runs a model that binds sequences on the rows of all its slots

`configuration`, `frames` and `stepping.frames` are the boundary, shared by both processes. Beside them the
worker imports only `loader`, for the model's name, and `stepping.chunks`.
"""
