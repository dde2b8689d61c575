"""Tests of an application that uses Carpool: models in the process of the test, and a small real stack.

engine          one model: a batcher's rules and a worker's code around it, without Redis and processes
waiting_engine  the same of an async model, and of one that calls others
models          from a model, and its parameters, to its engine
transport       what a producer has in place of connections: the models, which get the commands for Redis
clients         LocalAsyncClient and LocalClient
plugin          the fixtures `carpool_stack` and `carpool_client` of pytest
stack           the stack of these fixtures

Programs import it as `carpool.testing`.
"""
