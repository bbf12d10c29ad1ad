"""The error of a fuzzer."""


class Find(Exception):
    """An error message that names nothing, or a missing error."""
