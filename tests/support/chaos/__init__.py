"""Faults under load, as a tool: `make chaos`.

faults     which there are: what is inflicted, how long recovery may take, whether it is covered
producer   the program of a producer, which sends again what it does not know to be accepted
enqueuer   the program of a producer whose results another process reads by their IDs
producers  starts producers, and reads what they recorded
client     the program of HTTP clients
clients    starts HTTP clients, and judges what they recorded
resending  a proxy of HTTP that sends a request again when its connection breaks
servers    what services and producers connect to: one Redis, with Sentinel, a cluster, a network between
run        one run: a stack under load, a fault, and what became of each request
streams    what became of the texts that readers read through gateways
gateway_run     a run with gateways, and HTTP clients beside the producers
gateway_faults  the faults of gateways
nodes           versions that are replaced on nodes, while these are killed
node_producer   the program of their producers
report     the tables
main       the command
"""
