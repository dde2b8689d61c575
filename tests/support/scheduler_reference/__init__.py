"""A plain reference model of the scheduler, and its checks of each decision: see `test_scheduler_machine`."""
