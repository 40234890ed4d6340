"""`sortedrl report`: charts of one or several runs on a self-contained HTML page."""
