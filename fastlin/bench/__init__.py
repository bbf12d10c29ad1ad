"""What the ops cost: `fastlin bench`. Cases that are checked, then timed, against peers and the machine's limits."""
