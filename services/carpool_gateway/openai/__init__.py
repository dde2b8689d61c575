"""OpenAI's API, as functions of bytes: requests -> bodies for a model, and what it writes -> answers."""
