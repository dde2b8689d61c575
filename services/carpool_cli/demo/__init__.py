"""`carpool demo`: a documentation search on this machine, with measured throughput and checked results."""
