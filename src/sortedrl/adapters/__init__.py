"""Our scheduler inside other trainers. `host.py` is what they share; trl.py, verl.py and nemo_rl.py are thin on top.

A user of such a trainer keeps it: model, loss, optimiser and logging are its own. It gets its batches from our
controller, with the guarantees of docs/reference/guarantees.md and a ledger that proves them.
docs/guides/other_trainers.md is the guide.
"""
