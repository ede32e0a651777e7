"""The ``cudatool`` command, also as ``python -m cudatool``."""

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line, of which nothing is loaded yet: Ctrl-C is status 130 from here on.

    Before that, while Python itself starts and imports this module, Ctrl-C is Python's to report.

    When the command has ended, Ctrl-C has nothing to end: Python, which would die of it while it tidies up, ignores it.
    """
    try:
        try:
            from cudatool.cli import main as run  # inside, for Ctrl-C while it is imported

            run()
        finally:
            import signal

            signal.signal(signal.SIGINT, signal.SIG_IGN)
    except KeyboardInterrupt:
        sys.stderr.write("cudatool: interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
