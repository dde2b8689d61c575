"""The benchmark grid: Carpool and other systems under the same workloads, side by side on one machine.

make bench                                   # everything, about twelve minutes
.venv/bin/python -m grid --help              # from ops/bench: choose systems, workloads, rounds

catalog       the systems: what is installed, how each is started, and how its documents say it is used
systems/      a file for each: the service as its user would write it, and a client
models        what each system serves
workloads     what is measured
environments  a Python environment for each system
setup         what a service and its client are told
runner        starts and stops processes
redis_server  a Redis for one measurement
producer      the producer process, which runs in the environment of the system
load          sends the requests there, so that every system is driven by the same loops
processes     CPU time and memory of process trees, from /proc
machine       what the figures depend on
report        what was measured, as text, as JSON, and as a document
plots         its plots
http_servers  docs/benchmarks_http.md
profile       docs/profile.md
soak          `make soak`
"""
