"""Models: raw parameters of R trials, and their maps to the p, W, v or A, C, h of the ops."""

from fastlin.models.base import Model, Shape, Start
from fastlin.models.layer import Full, Reduced, Separate
from fastlin.models.softmax import Softmax
from fastlin.models.stack import Stack
from fastlin.models.storage import KINDS, load, save
from fastlin.models.units import Units, literal, measured

__all__ = [
    "KINDS",
    "Full",
    "Model",
    "Reduced",
    "Separate",
    "Shape",
    "Softmax",
    "Stack",
    "Start",
    "Units",
    "literal",
    "load",
    "measured",
    "save",
]
