"""Speed of the parts beside that of their peers; `sortedrl bench` and benchmarks/ call it."""
