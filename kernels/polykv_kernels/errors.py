"""The error of this package; what is wrong with arguments is a ValueError or a TypeError."""


class BackendError(RuntimeError):
    """A backend or instruction set was forced that does not exist, is not usable here, or cannot do what is asked."""
