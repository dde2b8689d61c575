"""The benchmark grid: Carpool and other systems under the same workloads, side by side on one machine.

    make bench                                   # everything, about twelve minutes
    .venv/bin/python -m grid --help              # from ops/bench: choose systems, workloads, rounds

`catalog.py` lists the systems: what is installed, how each is started, and how its documents say it should be
used. `systems/` has one file for each: the service as its user would write it, and a client. `workloads.py`
says what is measured, `load.py` sends the requests. Both run in the *producer process* (`producer.py`), in
the Python environment of the system, so that every system is driven by the same loops. `processes.py` reads
the CPU time and the memory of process trees from /proc. `runner.py` starts and stops processes, `report.py`
and `plots.py` write what was measured.

`soak.py` (`make soak`) and `profile.py` use the same parts.
"""
