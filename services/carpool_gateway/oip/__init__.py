"""The Open Inference Protocol, version 2, over HTTP: bytes to requests, and results to bytes. No I/O.

`requests.decode_request` reads what a client sends, `plans.plan` makes the bodies of requests of it, one for
each row of the batch, and `responses.encode_response` makes a response of the results. The other documents of
the protocol are in `documents`. Whatever a client sends, only ProtocolError is raised.

https://github.com/kserve/open-inference-protocol, with the extensions of Triton: binary tensor data,
classification, parameters, schedule policy, sequence, statistics, model configuration, model repository.
"""
