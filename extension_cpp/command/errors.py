"""The error of the commands."""


class CannotMake(Exception):
    """Says in one sentence why a command does nothing, such as writing no files."""


def require(fits: object, message: str) -> None:
    """Raises CannotMake unless something fits."""
    if not fits:
        raise CannotMake(message)
