"""Prediction of a step from the execution order of the last one.  Pure, and the same on every rank."""
