"""The processes that a recorded program starts: how they are noticed, and how recording begins in them.

A line in ``cudatool_child.pth``, which Python reads as it starts, calls :func:`cudatool.processes.child.start` where
the environment says that the process comes from a recorded one. This package imports only a little of the standard
library: a thousand processes that never use a device should cost next to nothing.
"""
