"""The learner on several processes (FSDP2). Each process holds a share of the weights."""
