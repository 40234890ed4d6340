"""One training run around the controller: building its parts, its directory, checkpoints, evaluation, fine-tuning."""
