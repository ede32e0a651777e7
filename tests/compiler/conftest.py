"""Tests of this room run on whatever device the process has: see ``tests/on_device.py``."""

from on_device import calls, delay, device, events, nothing_leaks, second, shared_by_threads

__all__ = ["calls", "delay", "device", "events", "nothing_leaks", "second", "shared_by_threads"]
