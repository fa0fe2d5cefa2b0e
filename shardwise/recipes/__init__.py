"""What ``shardwise train`` does on one rank: a small GPT, its text, its loop, its run folder."""
