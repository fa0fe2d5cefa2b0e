"""Fewer bits for tensors that travel: what is coded, how, and how far that is from the truth.  Pure: no process group."""
