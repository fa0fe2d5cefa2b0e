"""What ranks write down when something fails, and what can be said of it when all of it lies together."""
