"""Carpool's own HTTP interface: a body in, a body out. Pure functions of headers and bytes."""
