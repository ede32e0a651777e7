"""A trace in numbers: peaks, call sites, kernels and copies. It says what was, not why: that is cudatool.analyze.

``cudatool run`` prints it after every program, so it imports little: :mod:`cudatool.trace` and NumPy.
"""
