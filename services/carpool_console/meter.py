"""What the console measures."""

from __future__ import annotations

from carpool.service_metrics import CommonMetrics


class ConsoleMetrics(CommonMetrics):
    """The metrics of a console process."""
