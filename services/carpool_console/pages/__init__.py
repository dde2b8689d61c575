"""A module for each page: `routes(console)` has its handlers, which make a template's context or act.

The navigation shows those that have an entry in it; the page of a model those that are about the model.
"""

from __future__ import annotations

from typing import Final

from carpool_console.console import Page
from carpool_console.pages import model, nodes, overview, workers

PAGES: Final = (overview, model, workers, nodes)
NAVIGATION: Final = (Page("/", "Models"), Page("/workers", "Workers"), Page("/nodes", "Nodes"))
MODEL_LINKS: Final[tuple[Page, ...]] = ()
