"""What a fuzzer finds."""


class Find(Exception):
    """An error that does not say what it is about, or none where there should be one."""
