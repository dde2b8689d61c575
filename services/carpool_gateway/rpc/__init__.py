"""gRPC: the calls of KServe's service, `inference.GRPCInferenceService`, as Triton extends it, and of the
standard services for health and reflection.

What clients do wrong is no error of the gateway: grpcio would write a line about it to standard error, among
the lines of the log.
"""

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # before grpc is imported
