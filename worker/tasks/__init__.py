"""Tasks: the model, the data, the loss and the evaluation of a run.

`registry` builds the task of a run spec. `base.task` is the interface of a task. `base.transformer`
is the base class of tasks with a transformer: start there to add one.
"""
