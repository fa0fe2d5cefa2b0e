"""ZeRO-1 and ZeRO-2: the implementation of ZeroRedundancyOptimizer."""
