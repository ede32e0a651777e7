"""Callbacks for training frameworks, one module each, which imports its framework.

:mod:`cudatool.callbacks.transformers` is for the Trainer of Hugging Face, :mod:`cudatool.callbacks.lightning` for
Lightning.
"""
