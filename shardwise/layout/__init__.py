"""Who holds what: which elements of which tensor are whose, in closed form.  Pure."""
