"""The error of the commands."""


class CannotMake(Exception):
    """Says in one sentence why a command does nothing, such as writing no files."""
