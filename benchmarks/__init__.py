"""Times the ops beside PyTorch and beside a copy of memory: python -m benchmarks --help."""
