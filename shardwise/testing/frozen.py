"""Imported last by a server that processes are forked from: no collection in them goes through, or copies, what it holds."""

import gc

gc.collect()
gc.freeze()
