"""The files that `sortedrl init NAME` writes; the word `starter` in their names and in run.toml becomes NAME."""
