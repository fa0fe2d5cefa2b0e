"""Chaos: random jobs behind every API and over every transport, each with one fault; none may end in silence."""
