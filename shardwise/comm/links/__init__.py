"""Ways in which the ranks of one group may exchange tensors beside collectives."""
