"""What a model does for single requests beside its batches: `decode` before one, `encode` after it.

    worker ──frame──▶ intake ──bodies──▶ decode, in several threads or processes
                                            │ a whole frame
                                            ▼
                      predict, in the main thread: of one frame while the next is decoded
                                            │ results
                                            ▼
    worker ◀─outcome── finisher ◀─────── encode, in the same threads or processes

    loop       the threads of this, and the order of frames
    work       a frame on its way: its bodies decoded, and what the model gets of them
    pool       the threads that decode and encode, in the order of frames
    callers    what such a thread calls: the model's methods here, or a process of its own
    process    a decoder process, as the model process has it
    child      a decoder process from inside
    exchange   the memory that both have, and values in it
    declared   what a model declares of this

A worker sends at most two batches ahead, so at most two are decoded, or wait for that, at a time.

Why: docs/decisions/0104.
"""
