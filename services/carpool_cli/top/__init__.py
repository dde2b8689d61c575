"""`carpool top`: load, latency and dispatch reasons of each model, live."""
