"""Transports between the two roles. `base` is the contract, `registry` the list of names."""
