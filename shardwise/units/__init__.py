"""What a step moves: units, their parameters, shards, gradients and memory."""
