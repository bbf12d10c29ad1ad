"""Task sources, batches and the counter-based generator of random numbers."""
