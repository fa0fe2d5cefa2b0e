"""Weights that follow training: versions of a model's weights as files, written by all ranks, read by inference engines."""
