"""A fuzzer of training programs: sharded training against one process.

``python -m fuzz --minutes 10 --ranks 4 --seed 1`` draws models and programs, carries each out with
several APIs of shardwise, with torch's own class and with plain torch in one process, and compares all that can be seen
after every action.  What differs is shrunk and written as a script.  How it is built: docs/design/.
"""
