"""Watching what runs: the kernels' checkers, the host's accesses, and a tape that runs again in another order."""
