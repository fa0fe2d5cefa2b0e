"""Checks of user programs beside the step: what they find is a named error or a warning, and nothing is repaired."""
