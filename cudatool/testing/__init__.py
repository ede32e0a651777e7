"""The pytest plugin: tests under the sanitizer, limits on their memory, and their traces.

:mod:`.plugin` is what pytest loads; the rest is imported when a run asks for it.
"""
