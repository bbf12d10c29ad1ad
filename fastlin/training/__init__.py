"""Training: regimes and presets are rows of tables, and one loop serves all of them. It sees samples only."""
