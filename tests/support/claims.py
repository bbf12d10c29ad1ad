"""Short training for claims, and trained cells whose risk a test sets."""

from fastlin.figures.claims import closed

SIZES = {"trials": 2, "steps": 20, "batch": 64}


class Oracle:
    """Cells whose risk is `excess` above the closed form of their regime."""

    seed = 0

    def __init__(self, excess):
        self.excess = excess
        self.optima = dict(zip(("plain", "fine-tune", "joint", "joint+heads"), closed.OPTIMA, strict=True))

    def risk(self, name, mix, regime, n):
        return float(self.optima[regime](mix, n)) * (1 + self.excess)

    def described(self):
        return "no training"
