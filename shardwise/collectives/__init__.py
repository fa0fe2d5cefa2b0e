"""How bytes move: collectives, streams, buffers, compression. It knows no unit and no module."""
