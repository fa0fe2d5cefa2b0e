"""A step that happens on all ranks or on none: agreement, the state before it, and the way back."""
