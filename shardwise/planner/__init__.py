"""Plan before you run: the memory and the time of a model on any number of ranks, and which way to take.

``plan/`` says what the engine does with units; this package asks it about ranks that are not there.
"""
