"""Many traces as one Parquet data set, and questions about all of them: DuckDB reads the files, not Python.

:mod:`~cudatool.fleet.schema` says what is in it, :mod:`~cudatool.fleet.convert` writes it.
"""
