"""Optimizers over shards: any class with a rule, run element by element or on whole matrices; clipping."""
