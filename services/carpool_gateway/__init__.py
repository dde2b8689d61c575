"""The HTTP gateway: requests of HTTP clients become requests of models, and results become answers."""
