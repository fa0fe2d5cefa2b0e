"""Exit codes of the command, and the variable by which a rank knows its launcher."""

EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_INTERRUPTED = 130
LAUNCHER_VARIABLE = "SHARDWISE_LAUNCHER_PID"
