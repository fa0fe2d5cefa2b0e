"""A step that happens on all ranks or on none: agreement, copies of the state before it, and undo."""
