"""What happens in a step: hooks, roots, the engine of a root, and how modules become units."""
