"""Programs whose ranks take different ways (``set_allow_rank_divergence``, ``Join``), beside one process on the whole batch.

The programs of :mod:`fuzz.case` are one text that all ranks run.  Here each rank has its own list of forwards and backwards.
"""
