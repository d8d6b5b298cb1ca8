"""Timings against PyTorch and the bandwidth of memory: python -m benchmarks --help."""
