"""Carpool: requests share the ride. See README.md; a producer needs only `Client` or `AsyncClient`."""

from carpool.client import AsyncClient, Client, Reply
from carpool.errors import CarpoolError
from carpool.tensors import TensorSpec

__all__ = ["AsyncClient", "CarpoolError", "Client", "Reply", "TensorSpec"]
