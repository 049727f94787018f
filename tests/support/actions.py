"""Actions that environments have to clip."""

import torch


def beyond_bounds(actions: torch.Tensor) -> torch.Tensor:
    """Of actions inside a Box, every other environment's times ten; discrete actions as they are."""
    if not actions.is_floating_point():
        return actions
    scaled = actions.clone()
    scaled[::2] *= 10
    return scaled
