"""An accelerator that computes nothing beside the host, and proves that it could have: streams and memory lifetimes checked."""
