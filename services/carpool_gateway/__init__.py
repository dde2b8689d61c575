"""The HTTP gateway: requests of HTTP clients become requests of models, and results their responses."""
