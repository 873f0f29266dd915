"""The interface of a task, the base class of tasks with a transformer, and train/eval modes."""
