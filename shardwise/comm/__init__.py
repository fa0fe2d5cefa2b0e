"""How bytes move: collectives, streams, memory on loan, and facts that ranks compare.  It knows no unit and no module."""
