"""Tell a profiler when to look: the driver's profiler control, with a range in cudatool's traces."""

from cudatool.profiler._control import profile, start, stop

__all__ = ["profile", "start", "stop"]
