"""What tasks share: the interface, the base class of tasks with a transformer, train/eval modes."""
