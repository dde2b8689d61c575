"""Goodput: requests answered OK within their deadline. The command is ops/bench/goodput.py.

points            the models and the points at which goodput is measured
bounds            what no policy can exceed: U1 and U3
rivals            policies of other systems, for the simulator
virtual           goodput of all policies in virtual time
virtual_document  GOODPUT.md and its plot
load              a producer on the real system: what became of each request, and why
stack             Redis, a batcher and a worker, for one model and number of workers
plans             which runs to do on the real system, and in which order
measure           does them
runs              what a run showed, beside its bound and virtual time
flood             bodies that are refused, or that make the model raise, beside other requests
real_document     GOODPUT_REAL.md
"""
