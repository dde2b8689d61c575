"""The replica of a model that has the states of sequences in its process, and its inbox."""
