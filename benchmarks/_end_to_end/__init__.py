"""The parts of benchmarks/end_to_end.py: one module a family of systems, and what they share."""
