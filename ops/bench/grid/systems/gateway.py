"""Carpool's gateway, under wrk. Its model is that of `carpool.py`.

Started as in docs/http.md. The client `wrk` sends raw bytes to /carpool/v1, `wrk-v2` one row to /v2, and
`wrk-v2-rows` many rows in a call.
"""

from __future__ import annotations

from grid.models import MODELS
from grid.setup import Setup
from grid.systems.client_wrk import Call, WrkClient, connect_wrk
from grid.systems.open_inference import connect_v2


async def connect(setup: Setup) -> WrkClient:
    """The client that the setup names."""
    if setup.client != "wrk":
        return await connect_v2(setup)
    model = MODELS[setup.model]
    call = Call(
        f"/carpool/v1/models/{setup.model}/infer",
        {"Content-Type": "application/octet-stream"},
        model.body(0).tobytes(),
    )
    return await connect_wrk(setup, call, model.decode_result)
