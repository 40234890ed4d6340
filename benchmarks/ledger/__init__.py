"""The ledger: what it costs, and what it proves after a crash."""
