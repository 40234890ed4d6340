"""Tasks and rewards: what the verifiers accept, and whether `sortedrl eval` scores as an independent script does."""
