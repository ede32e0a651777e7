"""What ``import cudatool`` offers of a device: devices, streams, events, memory, arrays, kernels and copies.

Programs take these names from :mod:`cudatool` itself. Operations on arrays (``ops``, ``blas``, ``random``, ...)
stand above this room.
"""
