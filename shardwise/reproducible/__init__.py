"""Training whose bits do not depend on the number of ranks: microbatches by number, and sums along one fixed tree."""
