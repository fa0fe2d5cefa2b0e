"""Around a training loop of a user's own: its ranks on this host, and the figures of its steps."""
