"""The command ``shardwise``: options, local ranks and exit codes."""
