"""A module for each page: `routes(console)` has its handlers, which make a template's context or act.

The navigation shows those that have an entry in it; the page of a model those that are about the model.
"""

from __future__ import annotations

from typing import Final

from carpool_console.console import Page
from carpool_console.pages import (
    audit,
    control,
    dead,
    find,
    jobs,
    loading,
    model,
    nodes,
    overview,
    settings,
    workers,
)

PAGES: Final = (overview, model, workers, nodes, dead, find, settings, control, loading, jobs, audit)
NAVIGATION: Final = (
    Page("/", "Models"),
    Page("/workers", "Workers"),
    Page("/nodes", "Nodes"),
    Page("/dead", "Dead letters"),
    Page("/find", "Find"),
    Page("/load", "Load"),
    Page("/jobs", "Jobs"),
    Page("/audit", "Audit"),
)
MODEL_LINKS: Final = (Page("dead", "Dead letters"), Page("settings", "Settings"), Page("control", "Control"))
