"""The caching allocator: PyTorch's policy over any source of segments, its settings, statistics and snapshots."""

from cudatool.memory.allocator import CachingAllocator
from cudatool.memory.provider import SegmentProvider
from cudatool.memory.settings import Settings
from cudatool.memory.table import memory_summary

__all__ = ["CachingAllocator", "SegmentProvider", "Settings", "memory_summary"]
