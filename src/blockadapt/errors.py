"""Defines exceptions that callers may want to catch by name."""


class NonFiniteGradientError(RuntimeError):
    """Says that a gradient holds NaN or infinity, or is so large that g gᵀ overflows. Nothing was changed.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(3))
        >>> weight.grad = torch.tensor([1.0, torch.nan, torch.inf])
        >>> BlockAdam([("weight", weight)]).step()
        Traceback (most recent call last):
        ...
        blockadapt.errors.NonFiniteGradientError: BlockAdam: the gradient of 'weight' has 2 of 3 entries that are not
        finite or exceed 2.9e+17; parameters and state are unchanged.
    """
