"""Tests of an application that uses Carpool: models in the process of the test, and a small real stack.

engine     one model: a batcher's rules and a worker's code around it, without Redis and processes
transport  what a producer has in place of connections: the models, and the commands that it sends to Redis
clients    LocalAsyncClient and LocalClient
plugin     the fixtures `carpool_stack` and `carpool_client` of pytest
stack      the stack of these fixtures

Programs import it as `carpool.testing`.
"""
