"""Actions that environments have to clip, and games that allow all of their spaces' actions."""

import torch

from gpu_vecenv.envs.registry import GAMES

UNMASKED = [name for name, game in GAMES.items() if not game.masks_actions]


def beyond_bounds(actions: torch.Tensor) -> torch.Tensor:
    """Of actions inside a Box, every other environment's times ten; discrete actions as they are."""
    if not actions.is_floating_point():
        return actions
    scaled = actions.clone()
    scaled[::2] *= 10
    return scaled
