"""gRPC: the calls of KServe's service, `inference.GRPCInferenceService`, as Triton extends it, and of the
standard service for health."""
