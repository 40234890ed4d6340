"""From logits to tokens: seeded noise, filters, draws and their log-probs. All engines with a model use it."""
