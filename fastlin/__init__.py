"""fastlin: compiled kernels for in-context learning with linear attention."""

from fastlin import models, reference, theory
from fastlin._info import info
from fastlin._version import __version__
from fastlin.backends import BackendError
from fastlin.data.points import PointSet
from fastlin.data.sources import FixedTask, SphereTasks, TaskMixture
from fastlin.ops.api import gram, gram_loss, gram_stack_loss, predict, prompt_loss, stack_loss, stack_predict
from fastlin.ops.sampled import sampled_loss, sampled_stack_loss
from fastlin.training.evaluate import Errors, evaluate
from fastlin.training.run import Run, load, train

__all__ = [
    "BackendError",
    "Errors",
    "FixedTask",
    "PointSet",
    "Run",
    "SphereTasks",
    "TaskMixture",
    "__version__",
    "evaluate",
    "gram",
    "gram_loss",
    "gram_stack_loss",
    "info",
    "load",
    "models",
    "predict",
    "prompt_loss",
    "reference",
    "sampled_loss",
    "sampled_stack_loss",
    "stack_loss",
    "stack_predict",
    "theory",
    "train",
]

for _name in reference.__all__:
    # A reference takes the arguments of the op of its name, and is documented by it.
    getattr(reference, _name).__doc__ = globals()[_name].__doc__
