"""What runs in a model process: one model, isolated from Redis and from the worker's threads.

main      the loop: receive a frame, execute it, send the outcome
frames    what crosses the process boundary: shared by both processes, and all that a worker imports from here
          to talk to its model process
executor  runs the model on a frame's items and isolates the failures
model     a user's model, adapted to one interface
loader    from a model's name on the command line to the model
"""
