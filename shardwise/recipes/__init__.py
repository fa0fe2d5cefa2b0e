"""The program of ``shardwise train`` on one rank: a small GPT, its text, its loop, its run folder."""
