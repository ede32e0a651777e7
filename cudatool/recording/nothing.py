# What a process finds in the place of a request that was withdrawn (cudatool.recording.inject). It runs in the module
# __main__ of that process, so that not even a docstring may stand here.
