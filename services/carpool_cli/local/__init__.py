"""Everything on one machine, under one supervisor, with a Redis of its own if there is none."""
