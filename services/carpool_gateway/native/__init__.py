"""Carpool's own interface, `/carpool/v1`: a body in, a body out."""
