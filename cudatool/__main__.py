"""``python -m cudatool`` is the ``cudatool`` command."""

from cudatool.cli import main

main()
