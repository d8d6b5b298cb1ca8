"""What `python -m extension_cpp` runs: demo, info, new, new-package and remove."""
