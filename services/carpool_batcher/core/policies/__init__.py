"""Policies: when a lane has a batch, what that has to wait for, and which requests are in it."""
