"""C sources that the local engine and the learner compile at first use, and what loads them."""
