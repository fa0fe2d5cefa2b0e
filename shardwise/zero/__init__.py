"""ZeRO-1: the implementation of ZeroRedundancyOptimizer."""
