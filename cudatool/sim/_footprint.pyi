"""What _footprint.c offers to footprint.py."""

def ranges(maps: tuple[int, ...], pages: int, base: int, forget: bool, /) -> list[tuple[int, int, int]]:
    """Return ``(address, size, flags)`` of each maximal run of bytes accessed in the same ways, by address.

    Parameters
    ----------
    maps
        The addresses of the maps of what is read, written and updated atomically, and of the marks of pages.
    pages
        How many there are.
    base
        The address that the first byte of the maps stands for.
    forget
        Whether to clear the maps.
    """
