"""What `python -m extension_cpp` runs: demo, info, new, remove and new-package."""
