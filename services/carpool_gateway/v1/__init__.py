"""OpenAI's API: the handlers of `/v1`, for models that declare that they speak it."""
