"""The learner over several processes (FSDP2), each holding a share of the weights."""
