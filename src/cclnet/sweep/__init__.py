"""Many training runs as one experiment: each resumable, evaluated, and reduced to a small result file."""

from cclnet.sweep.cells import Executor, RayOptions

__all__ = ["Executor", "RayOptions"]
