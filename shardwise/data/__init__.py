"""Data by seed, step and microbatch, the same at any number of ranks."""
