"""`carpool top`: load, latency and dispatch reasons of each model, live.

command  takes samples of all models, and shows them
figures  the figures of a model, from two samples
page     the page: tables, and details of each model
"""
