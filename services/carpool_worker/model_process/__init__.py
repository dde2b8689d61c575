"""What runs in a model process: one model, and nothing that knows Redis or the worker."""
