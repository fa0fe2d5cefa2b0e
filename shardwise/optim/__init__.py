"""Optimizers over shards: any class of torch's rules, element by element or on whole matrices; clipping."""
