"""Speed measured on the machine at hand: ``python -m benchmarks power``."""
