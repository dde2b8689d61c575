"""What runs in a model process: one model, isolated from Redis and from the worker's threads.

    main             loads the model, and starts its loop
    frame_loop       the loop: receive a frame, execute it, send the outcome
    frames           what crosses the process boundary
    frame_execution  from a frame to its outcome
    executor         runs the model on a frame's items and isolates the failures
    outputs          what a model returned for a batch: counted, matched, and as it is declared
    states           states of sequences: as a model declares and gets them, and as bytes
    failures         from what the model raised to a status and a detail, or to the end of the process
    broken_devices   which errors say that the accelerator does not work any more in this process
    raised           what the model raised, for the log and for operators
    printed          what the model prints and logs: in the log at once
    model            a user's model, adapted to one interface
    description      what a loaded model declares, as its worker gets it
    loader           from a model's name on the command line to the model

Of a stepping model:

    step_loop    the loop: take what the worker sent, advance, send what changed
    step_frames  what crosses the process boundary
    stepper      begins and steps requests, and isolates the failures
    slots        which requests wait, which have a slot, which take part in the next step
    generation   a request: what it has emitted, what of that was sent
    stepping     what the model sees of a request; generator functions as models
    chunks       emitted values as one

Of a model that binds sequences:

    bound_executor  which sequence has which slot; runs the model on the rows of all slots

`frames` and `step_frames` are the boundary, shared by both processes. Beside them the worker imports only
`loader`, for the model's name, and `chunks`.
"""
