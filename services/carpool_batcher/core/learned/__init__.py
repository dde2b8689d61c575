"""What was learned of batches: l(n), transit, and how many requests a model executes."""
