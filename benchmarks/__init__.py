"""One script for each claim: `python -m benchmarks.FOLDER.NAME`. README.md lists them with their last figures."""
