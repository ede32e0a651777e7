"""The driver's entry points, by the sections of NVIDIA's reference. They are reached through a table, not by import."""
