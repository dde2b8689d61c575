"""Sequences: which request is the next, where there is space, and which are idle or broken."""
