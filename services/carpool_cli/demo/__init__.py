"""`carpool demo`: search in the documentation on this machine, request by request, measured and checked."""
