"""``shardwise bench``: shardwise's and torch's ways of training the same GPT, stepped in turns within one run."""
