"""Native kernels for arithmetic on every byte of a step.

The numpy functions of `protocol.exact` are the definitions; each `.c` file names the ones that it
computes, with the same bits and in one pass over memory. Libraries are built when samestep is
installed (`protocol.machine.compiler`). Without one, numpy computes the same bits more slowly.
Imports no other chapter. Start with `library`.
"""
