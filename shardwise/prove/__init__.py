"""``shardwise prove``: a training script as it is, held against plain data parallelism, to the first tensor that differs."""
