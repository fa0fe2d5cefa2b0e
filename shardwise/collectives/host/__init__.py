"""Transports that only CPU ranks use: shared memory on one host, sends and receives, and both in a hierarchy."""
