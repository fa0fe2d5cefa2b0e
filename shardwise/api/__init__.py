"""The doors: check arguments, choose what is sharded, attach it to modules."""
