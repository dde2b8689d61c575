"""What waits: limits and totals, lanes, fair turns of tenants, delays, copies, withdrawals."""
