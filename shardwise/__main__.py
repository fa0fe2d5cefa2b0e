"""``python -m shardwise``: the command, where its script is not on the PATH."""

import sys

from shardwise.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
