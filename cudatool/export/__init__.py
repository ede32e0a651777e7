"""Writers of what other tools read: Perfetto, SQLite, PyTorch's pickles."""
