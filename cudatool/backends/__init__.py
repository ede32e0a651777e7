"""Switches of the libraries that the runtime calls, as in ``torch.backends``."""

from cudatool.backends import cuda

__all__ = ["cuda"]
