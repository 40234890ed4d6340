"""Tasks: where prompts come from and how answers are scored."""
