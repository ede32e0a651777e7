"""CUDA graphs: what they are made of, how they are captured, and how they run."""
