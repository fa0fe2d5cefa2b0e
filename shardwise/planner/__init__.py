"""Plan before you run: the memory and the time of a model on any number of ranks, and which way to take.

``plan/`` predicts what the engine does with units; this package applies it to ranks that do not exist.
"""
