"""Streams of stepping models: when tokens come, and what they cost. The command: ops/bench/streaming.py.

models      what is served: a sleeper, and a network of GPT-2's shape; each steps, or executes static batches
workloads   which requests arrive when: a burst, Poisson, or more than can be served
heard       what the producer saw of each request, and the figures of that. Pure
in_process  both kinds of models in one process: the production `Stepper`, and static batches
systems     the same on the real system: Redis, batcher, worker, and an AsyncClient
producer    sends requests there when they are due, and reads streams
runs        runs of all systems in turn, repeated while the host withholds CPU time
document    docs/streaming.md and its plots
"""
