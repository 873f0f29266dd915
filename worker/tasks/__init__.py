"""Tasks: the model, the data, the loss and the evaluation of a run.

`registry` builds the task of a run spec. `base.task` is the interface of a task, and
`base.transformer` what every task with a transformer shares: start there to add one.
"""
