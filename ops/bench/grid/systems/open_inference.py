"""The Open Inference Protocol, with binary data, under wrk: for Carpool's gateway and for PyTriton."""

from __future__ import annotations

import json
from typing import Final

import numpy as np

from grid.models import MODELS, Array
from grid.setup import Setup
from grid.systems.client_wrk import Call, WrkClient, connect_wrk

ROWS: Final = 64  # in a call of the client `wrk-v2-rows`


def call_of(setup: Setup) -> Call:
    """The call, which has one row, or with the client `wrk-v2-rows` as many as ROWS."""
    model, rows = MODELS[setup.model], ROWS if setup.client == "wrk-v2-rows" else 1
    data = model.body(0).tobytes() * rows
    tensor = {"name": "x", "shape": [rows, *model.shape], "datatype": model.datatype}
    head = json.dumps(
        {
            "inputs": [{**tensor, "parameters": {"binary_data_size": len(data)}}],
            "outputs": [{"name": "y", "parameters": {"binary_data": True}}],
        }
    ).encode()
    headers = {
        "Content-Type": "application/octet-stream",
        "Inference-Header-Content-Length": str(len(head)),
    }
    return Call(f"/v2/models/{setup.model}/infer", headers, head + data, rows)


async def connect_v2(setup: Setup) -> WrkClient:
    """wrk. The data of a response follow its JSON."""
    model, call = MODELS[setup.model], call_of(setup)
    size = np.dtype(model.dtype).itemsize * int(np.prod(model.result_shape)) * call.rows

    def decode(response: bytes) -> Array:
        data = np.frombuffer(response[-size:], model.dtype)
        return data.reshape(call.rows, *model.result_shape)

    return await connect_wrk(setup, call, decode)
