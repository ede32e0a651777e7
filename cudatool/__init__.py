"""CUDA runtime with trace hooks."""
