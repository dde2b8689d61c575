"""PyTriton: NVIDIA's Triton Inference Server, with the model in a Python process beside it.

As its documents advise: `bind` with `batching` and a `DynamicBatcher`
(https://triton-inference-server.github.io/pytriton/latest/binding_models), and the decorator `@batch`, with
which the model gets a batch as one array. Tensors are binary data, as its own client sends them.

The server has an interpreter of its own, which must be the same as this one: so it is told where the shared
library of this one is (https://triton-inference-server.github.io/pytriton/latest/installation).
"""

from __future__ import annotations

import os
import sysconfig

import numpy as np
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

from grid.models import MODELS, Array
from grid.setup import HOST, Setup
from grid.systems.open_inference import connect_v2

SETUP = Setup.from_environment()
MODEL = MODELS[SETUP.model]


@batch
def infer(x: Array) -> dict[str, Array]:
    """(n, *shape) -> (n, *result_shape)."""
    return {"y": np.stack(MODEL.predict(list(x)))}


connect = connect_v2

if __name__ == "__main__":
    libraries = [str(sysconfig.get_config_var("LIBDIR")), os.environ.get("LD_LIBRARY_PATH", "")]
    os.environ["LD_LIBRARY_PATH"] = ":".join(filter(None, libraries))
    config = TritonConfig(
        http_address=HOST, http_port=SETUP.port, allow_grpc=False, allow_metrics=False, log_verbose=0
    )
    with Triton(config=config) as triton:
        dtype = np.dtype(MODEL.dtype).type
        triton.bind(
            model_name=SETUP.model,
            infer_func=infer,
            inputs=[Tensor(name="x", dtype=dtype, shape=MODEL.shape)],
            outputs=[Tensor(name="y", dtype=dtype, shape=MODEL.result_shape)],
            config=ModelConfig(
                max_batch_size=SETUP.batch_size,
                batcher=DynamicBatcher(max_queue_delay_microseconds=round(SETUP.wait_ms * 1000)),
            ),
            strict=False,
        )
        triton.serve()
