"""Optimizer state outside of the memory of the device: updates that run while backward runs, and where the state lives."""
