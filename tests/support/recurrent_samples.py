"""Recurrent cells with inputs, and how exactly a layer of kernels computes their outputs and gradients."""

import copy

import torch

from gpu_vecenv.train.recurrent import RecurrentCells, kept
from support.bitwise import equal_bits
from support.perceptrons import ROUNDING_UNITS

STEPS, INPUTS = 6, 20
NAN = float("nan")
PARAMETERS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


class Sample:
    """Cells, their inputs, a state, flags, and gradients of the outputs: random, with ends of episodes."""

    def __init__(self, units, rows, device, *, kind="gru", apart=False, steps=STEPS, count=2):
        random = torch.Generator().manual_seed(1)

        def normal(*shape, size=1.0):
            return (size * torch.randn(shape, generator=random)).to(device)

        self.cells = RecurrentCells(kind, INPUTS, units, count).to(device)
        with torch.no_grad():
            for p in self.cells.parameters():
                p.copy_(normal(*p.shape, size=2 * p.shape[-1] ** -0.5 if p.ndim == 3 else 0.5))
        self.features = [normal(steps * rows, INPUTS) for _ in range(count if apart else 1)]
        self.state = normal(rows, self.cells.state_size).tanh()
        self.gradients = [normal(steps, rows, units) for _ in range(count)]
        self.active = (torch.rand((steps, rows), generator=random) < 0.8).to(device)

    @property
    def differentiated(self):
        """By what gradients are taken, in the order of ``results``."""
        return [*(getattr(self.cells, name) for name in PARAMETERS), *self.features]


def results(sample, layer=None, dtype=torch.float64):
    """Outputs (cells, steps, rows, units), and gradients: of a layer, or of the cells step by step in a dtype."""
    if layer is not None:
        own = copy.copy(sample)
        own.features = [x.clone().requires_grad_() for x in sample.features]
        outputs = layer.sequence(own.cells, own.features, own.state, own.active)
    else:
        own = copy.copy(sample)
        own.cells = copy.deepcopy(sample.cells).to(dtype)
        own.features = [x.to(dtype).requires_grad_() for x in sample.features]
        outputs = torch.stack(step_by_step(own, dtype), 1)
    gradients = [g.to(outputs[0].dtype) for g in sample.gradients]
    found = torch.autograd.grad(list(outputs), own.differentiated, gradients)
    return [torch.stack(list(outputs)).detach().double(), *(g.double() for g in found)]


def step_by_step(sample, dtype):
    """As RecurrentActorCritic.sequence, without rounding to float32 in between."""
    cells, units = sample.cells, sample.cells.units
    of_each = sample.features * (cells.count // len(sample.features))
    inputs = torch.stack([x @ w.T + b for x, w, b in zip(of_each, cells.weight_ih, cells.bias_ih, strict=True)])
    inputs = inputs.unflatten(1, sample.active.shape)
    parts, outputs = cells.parts(sample.state.to(dtype)), []
    for t, is_active in enumerate(sample.active):
        hidden, of_step = torch.baddbmm(cells.bias_hh[:, None], parts[0], cells.weight_hh.mT), inputs[:, t]
        if cells.kind == "gru":
            reset, update = (of_step[..., : 2 * units] + hidden[..., : 2 * units]).sigmoid().chunk(2, -1)
            new = (of_step[..., 2 * units :] + reset * hidden[..., 2 * units :]).tanh()
            parts = (new + update * (parts[0] - new))[None]
        else:
            enter, forget, new, leave = (of_step + hidden).chunk(4, -1)
            cell = forget.sigmoid() * parts[1] + enter.sigmoid() * new.tanh()
            parts = torch.stack([leave.sigmoid() * cell.tanh(), cell])
        outputs.append(parts[0])
        parts = kept(parts, is_active)
    return outputs


def sizes_of(sample, exact):
    """Of each result the norm, or of a bias, whose sum over the rows may cancel, that of the sums of absolute values.

    Errors are relative to these.
    """
    sizes = [x.norm().item() for x in exact]
    taken = copy.copy(sample)
    taken.gradients = [g.abs() for g in sample.gradients]
    for k, name in enumerate(PARAMETERS):
        if name.startswith("bias"):
            sizes[1 + k] = max(sizes[1 + k], results(taken)[1 + k].norm().item())
    return sizes


def check(sample, found, precision):
    """The norm of the error of the outputs and of each gradient."""
    exact, by_torch = results(sample), results(sample, dtype=torch.float32)
    for number, (own, other, full, size) in enumerate(
        zip(found, by_torch, exact, sizes_of(sample, exact), strict=True)
    ):
        if precision == "float32":
            # As many roundings as torch's own, in another order, and factors without their last 2 bits. The floor is
            # for sums that torch happens to round well: tensor cores cut off sums, by up to 2^-23 for each step of k.
            bound = max(4 * (other - full).norm().item(), 2.0**-20 * size)
        else:
            # A step rounds factors of the products of inputs and of states, and tanh of three gates; through the state
            # errors go on to the steps after it, less by z < 1 each: about twice as much.
            bound = 12 * ROUNDING_UNITS[precision] * size
        assert (own - full).norm().item() <= bound, number
        assert size > 0.1


def check_nan(sample, layer):
    """NaN spreads as in torch, in its own row up to the end of the episode: to 3 of at least 6 steps of over 7 rows."""
    rows, units = sample.active.shape[1], sample.cells.units
    sample.features[0][rows + 7, 3] = NAN  # row 7 in step 1
    sample.active[:, 7] = torch.tensor([True, True, True, False, True, True], device=sample.active.device)
    found, exact = results(sample, layer), results(sample)
    assert all(a.isnan().equal(b.isnan()) for a, b in zip(found, exact, strict=True))
    assert found[0][:, 1:4, 7].isnan().all() and found[0].isnan().sum() == 2 * 3 * units


def check_missing_gradient(sample, layer):
    """The second cell's outputs without a gradient: as with one of 0. Returns the gradients of the parameters."""
    zeros = copy.copy(sample)
    zeros.gradients = [sample.gradients[0], torch.zeros_like(sample.gradients[1])]
    actor, _ = layer.sequence(sample.cells, sample.features, sample.state, sample.active)
    found = torch.autograd.grad(actor, [getattr(sample.cells, name) for name in PARAMETERS], sample.gradients[0])
    assert equal_bits([g.double() for g in found], results(zeros, layer)[1:5])
    return found
