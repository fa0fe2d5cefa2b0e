"""Chaos: random jobs behind every door and over every transport, each with one fault; none may end in silence."""
