"""`sortedrl dashboard`: the same charts in a browser, updated while runs write."""
