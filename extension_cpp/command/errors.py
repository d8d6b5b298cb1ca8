"""The error of the commands that write files."""


class CannotMake(Exception):
    """Says in one sentence why the files cannot be written."""
