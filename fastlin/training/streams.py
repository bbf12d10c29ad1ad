"""Streams of the generator: what is drawn from which, so that no two uses meet.

Terms of an objective have the streams from 0 on, one for each term, or one for each term and trial.
"""

FIRST_RESERVED = 65_000
EVALUATE, POINTS, SELECT, REPORT, START, UNITS = 65_530, 65_531, 65_532, 65_533, 65_534, 65_535
