"""Tasks: where prompts come from and how answers are scored. Import the modules; this file stays light."""
