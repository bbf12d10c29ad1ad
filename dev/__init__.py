"""Tools for those who work on fastlin: planted faults, and counts of the GPU's machine code."""
