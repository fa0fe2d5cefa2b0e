"""ZeRO-1 and -2: what the parts of a ZeroRedundancyOptimizer do."""
