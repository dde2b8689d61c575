"""A whole stack on one machine, under one supervisor: Redis if none is given, a batcher, and workers.

up          `carpool up`
supervisor  starts and supervises the processes
reload      `carpool up --reload`
embedded    a Redis server as a child process
example     an example body for a model
paste       commands to copy, each of which sends one request
"""
