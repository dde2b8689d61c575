"""`carpool top`: load, latency and dispatch reasons of each model, live.

command  takes samples of all models, and shows them
page     the page: tables, and details of each model
detail   the detail of one model: lanes, tenants, batches, errors
"""
