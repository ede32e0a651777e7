"""PTX parsed: what the software device and static analysis both start from."""


class PtxError(Exception):
    """Placeholder until the parser lands."""
