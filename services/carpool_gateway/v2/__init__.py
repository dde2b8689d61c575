"""The Open Inference Protocol, `/v2`: its handlers. What its requests and responses are, `oip` knows."""
