"""Faults under load, as a tool: `make chaos`.

faults     which there are: what is inflicted, how long recovery may take, whether it is covered
producer   the program of a producer, which sends again what it does not know to be accepted
producers  starts producers, and reads what they recorded
servers    what services and producers connect to: one Redis, with Sentinel, a cluster, a network between
run        one run: a stack under load, a fault, and what became of each request
report     the tables
main       the command
"""
