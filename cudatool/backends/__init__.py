"""Switches of the libraries behind the runtime, as in ``torch.backends``."""

from cudatool.backends import cuda

__all__ = ["cuda"]
