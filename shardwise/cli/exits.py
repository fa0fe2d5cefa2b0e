"""Exit codes of the command, and the variables by which a rank knows its launcher, and the file through which ranks meet."""

EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_FINAL = (
    3  # of a rank, to its launcher: it failed, and would fail again; the command's own code is EXIT_FAILED then
)
EXIT_INTERRUPTED = 130
LAUNCHER_VARIABLE = "SHARDWISE_LAUNCHER_PID"
STORE_VARIABLE = "SHARDWISE_STORE"
ATTEMPT_VARIABLE = "SHARDWISE_ATTEMPT"
