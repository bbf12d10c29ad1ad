"""Streams of the random generator: each use has its own.

Terms of an objective use the streams from 0 up, one per term, or one per term and trial.
"""

FIRST_RESERVED = 65_000
EVALUATE, POINTS, SELECT, REPORT, START, UNITS = 65_530, 65_531, 65_532, 65_533, 65_534, 65_535
