"""From a configuration to the objects of a run. Only these modules name concrete classes."""
