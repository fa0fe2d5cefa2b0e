"""What will happen: a step predicted from the order of the last one.  Pure, and the same on every rank."""
