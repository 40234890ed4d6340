"""C sources that the local engine and the learner compile at first use, and the modules that compile and load them."""
