"""The public ops, and their registration with torch."""
