"""Benchmarks: what fastlin's ops cost, against what a user would write instead and against the machine's limits."""
