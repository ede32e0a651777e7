"""How modules and libraries get into this process: at first use, undisturbed, after a module of others, and from where.

Nothing here imports anything of ours, so that every room may use it.
"""
