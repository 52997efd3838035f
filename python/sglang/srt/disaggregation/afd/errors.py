"""Every error that AFD raises. Imports nothing, so that every other file may import it.

A message names the flag or the peer and the way out. `AFDConfigError` is for the person who
typed the command; the others describe a running system.
"""


class AFDError(RuntimeError):
    """Base of all errors of the AFD mode."""


class AFDConfigError(AFDError, ValueError):
    """A flag, or a combination of flags, that cannot work. Raised before anything starts."""


class PatchError(AFDError):
    """The installed SGLang is not the one whose seams we know, so a hook is not in force."""


class HandshakeRefused(AFDError):
    """Two ranks disagree about what they serve. The message holds both values."""


class PeerLost(AFDError):
    """A rank ended, or closed its connection, while somebody still needed it."""


class DeadlineExceeded(AFDError):
    """A bounded wait ran out. The message says rank, peer, layer, microbatch, step."""


class CapacityExceeded(AFDError):
    """More tokens than one dispatch may carry. Nothing was sent."""


class PlanMismatch(AFDError):
    """A message belongs to another step, layer, microbatch or round than the plan says."""
