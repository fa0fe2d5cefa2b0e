"""fully_shard, replicate and shard_model: modules become units of sharded parameters, and an engine runs their steps."""
