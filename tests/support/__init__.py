"""What tests share: servers, stacks, networks, models and producers, and checkers of what these received."""
