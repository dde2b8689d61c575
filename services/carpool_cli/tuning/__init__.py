"""Settings that are good, found without trying them on anybody: virtual time, and what a live model shows."""
