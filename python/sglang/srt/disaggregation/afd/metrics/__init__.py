"""Counters, times and the straggler of one rank: what is measured, how it is kept and shown."""
