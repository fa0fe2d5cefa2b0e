"""A run that outlives its ranks: survivors, and ranks that join, go on from memory, at any number of ranks."""
