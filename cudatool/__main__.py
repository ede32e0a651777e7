"""The ``cudatool`` command, also as ``python -m cudatool``."""

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line, of which nothing is loaded yet: Ctrl-C is status 130 from the first moment."""
    try:
        from cudatool.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("cudatool: interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
