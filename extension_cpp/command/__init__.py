"""Implements the commands of `python -m extension_cpp`: demo, info, check, new, remove and
new-package."""
