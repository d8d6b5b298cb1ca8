"""Commands of `python -m extension_cpp`: demo, info, check, new, remove, new-package."""
