"""A fuzzer of training programs: sharded training against one process.

``python -m shardwise.testing.fuzz --minutes 10 --ranks 4 --seed 1`` draws models and programs, carries each out with
several doors of shardwise, with torch's own class and with plain torch in one process, and compares all that can be seen
after every action.  What differs is shrunk and written as a script.  How it is built: docs/design/.
"""

from shardwise.testing.fuzz.case import Case, Contender, from_json, to_json
from shardwise.testing.fuzz.compare import Verdict
from shardwise.testing.fuzz.draw import draw
from shardwise.testing.fuzz.render import render
from shardwise.testing.fuzz.runner import Outcome, Runner
from shardwise.testing.fuzz.shrink import shrink

__all__ = ["Case", "Contender", "Outcome", "Runner", "Verdict", "draw", "from_json", "render", "shrink", "to_json"]
