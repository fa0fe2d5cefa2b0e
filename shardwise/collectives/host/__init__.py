"""Transports that only CPU ranks use: shared memory on one host, sends and receives, and both in a hierarchy."""

from shardwise.collectives.host.group_link import GroupLink, can_link
from shardwise.collectives.host.local_peers import take_shareable
from shardwise.collectives.routes import LinkProvider, link_providers


def register_transports() -> None:
    """Register these transports for groups of CPU ranks; ``shardwise/__init__.py`` calls it once."""
    link_providers.append(LinkProvider(can_link, take_shareable, GroupLink))
