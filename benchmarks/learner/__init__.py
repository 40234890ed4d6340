"""The learner: speed and memory of an update, ranks, and the correction of off-policy samples."""
