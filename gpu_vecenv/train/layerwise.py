"""The default network one layer at a time, for layers that do not fit together in a GPU's shared memory.

Nothing of it is autograd's: ``cuda/learner/layerwise.cu`` has activations, their derivatives, sums of biases and the
loss, each in one pass over the activations; products are torch's. In bfloat16, ``cuda/learner/layer_product.cu`` has
the products forward and back with what follows on them, where the weights of a layer fit in shared memory. A minibatch
is done in chunks of rows, whose gradients are added up in order. See ``perceptron.py`` for smaller networks.

In bfloat16, activations and factors of products are stored so; products accumulate in float32, and those of the heads
and of the weights' gradients are stored so. Log-probabilities in the first epoch are bitwise those of the rollout where
``layer_product.cu`` has all products, or a chunk has as many rows as a step. With other numbers of rows cuBLAS may
choose another kernel, and they are equal up to rounding.
"""

from __future__ import annotations

import torch

from gpu_vecenv.compile.backends import LaunchShape
from gpu_vecenv.compile.engine_kernels import squash_source
from gpu_vecenv.compile.function_manager import Launch
from gpu_vecenv.files import cuda_folder
from gpu_vecenv.train.kept_tensors import FlatTensors
from gpu_vecenv.train.layerwise_kernels import (
    ACTIVATED_ROWS,
    BLOCK,
    GATHERED_ROWS,
    LAYER_PRODUCT,
    LOSS_BLOCK,
    LOSS_SHARED_BYTES,
    PACK_BYTES,
    PRODUCT_ROWS,
    Layer,
    Layers,
    Product,
    ProductKind,
    layerwise_kernels,
    layerwise_source,
)
from gpu_vecenv.train.learner_kernels import LossSettings, loss_values
from gpu_vecenv.train.optimizer import num_squares, sum_parts_launch
from gpu_vecenv.train.perceptron import (
    METRICS,
    perceptron_of,
    tensor_cores_of,
    why_torch,
)
from gpu_vecenv.train.policy import Policy, Precision
from gpu_vecenv.train.rollout_storage import Rollout

MAX_ROWS = 2**18  # of a chunk: enough to fill a large GPU
MAX_TILES = 2048  # whose rows are added up for themselves
HAS_OUT_DTYPE = "dtype_out" in torch.ops.aten.mm.overloads()  # since torch 2.8


def why_not_layerwise(policy: Policy, rollout: Rollout) -> str | None:
    """Why torch computes a policy's gradients and forward passes, in a few words; None if kernels can."""
    if reason := why_torch(policy, rollout):
        return reason
    if rollout.env.functions.backend.tensor_cores is None:
        return "no tensor cores"
    each = 4 * (2 * policy.view.num_parameters + METRICS + 4)
    return None if each <= LOSS_SHARED_BYTES else "an action space too large for shared memory"


class LayerwiseKernels:
    """A policy layer by layer: gradients of minibatches, and the forward pass of a step's observations.

    Makes the policy's parameters views of one tensor. The methods are those of ``PerceptronKernels``.

    Args:
        policy: Its network is an ActorCritic for which ``why_not_layerwise`` is None.
        rollout: The samples.
        precision: Of the matrix products. "tf32" is that of torch's products while they are launched.
        chunk_rows: The largest number of rows of a forward pass.
    """

    def __init__(self, policy: Policy, rollout: Rollout, precision: Precision, chunk_rows: int) -> None:
        self.policy, self.rollout, self.parameters = policy, rollout, FlatTensors(list(policy.parameters()))
        self.perceptron = perceptron_of(policy, rollout.flat_obs(policy.view), precision)
        self._obs_stride = rollout.flat_obs(policy.view).stride(0)
        self.dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
        self.device = rollout.rewards.device
        self.layers = Layers(self.perceptron, PACK_BYTES // self.dtype.itemsize)
        self.chunk = min(chunk_rows, MAX_ROWS, rollout.rewards[:, :, policy.view.agents].numel())
        self._program = rollout.env.functions.compile(
            cuda_folder() / "learner/layerwise.cu",
            kernels=layerwise_kernels(rollout.env.game.layout),
            game=rollout.env.game,
            constants=squash_source(policy.squash) + layerwise_source(self.perceptron, self.layers),
        )
        self._weights = self._empty(self.layers.num_weights)
        normalizers = policy.obs_normalizer, policy.return_normalizer
        (obs_mean, obs_var), (return_mean, return_var) = (
            (None, None) if n is None else (n.mean, n.var) for n in normalizers
        )
        self._obs_scales = None if obs_mean is None else torch.zeros(2 * self.perceptron.obs_inputs, device=self.device)
        flat = {"parameters": self.parameters.flat}
        self.store_weights = self._program.prepare(
            "store_weights",
            LaunchShape(self.layers.num_weights * self.dtype.itemsize // PACK_BYTES),
            **flat,
            sources=self.layers.weight_sources.to(self.device),
            weights=self._weights,
            elements=self.layers.num_weights,
            obs_mean=obs_mean,
            obs_var=obs_var,
            obs_scales=self._obs_scales,
        )
        self._gather = self._program.prepare(
            "gather_inputs",
            self._blocks(GATHERED_ROWS),
            obs_stride=self._obs_stride,
            obs_scales=self._obs_scales,
        )
        self._activate = self._program.prepare("activate", self._blocks(ACTIVATED_ROWS), **flat)
        self._heads = {**flat, "return_mean": return_mean, "return_var": return_var}
        self._forward_products = [
            [
                self.product(layer, "ACTIVATIONS", self.perceptron.sizes[k + 1])
                if k < len(tower) - 1
                else self.product(layer, "RESULTS", layer.sources.shape[0])
                for k, layer in enumerate(tower)
            ]
            for tower in self.layers.towers
        ]
        # Activations of a chunk, beginning with the inputs, and the products of the heads.
        columns = [[layer.sources.shape[1] for layer in tower] for tower in self.layers.towers]
        inputs = self._empty(self.chunk, columns[0][0])
        self._activations = [[inputs, *(self._empty(self.chunk, n) for n in own[1:])] for own in columns]
        self._products = [
            torch.zeros((self.chunk, tower[-1].sources.shape[0]), device=self.device) for tower in self.layers.towers
        ]

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def _blocks(self, rows: int, threads: int = BLOCK) -> LaunchShape:
        """A launch with a block for each of so many rows of a chunk."""
        return LaunchShape(-(-self.chunk // rows), threads_per_item=threads, threads_per_block=threads, work=self.chunk)

    def product(self, layer: Layer, kind: ProductKind, units: int, first_sum: int = 0) -> ProductLaunch | None:
        """A launch of layer_product.cu with a layer's weights; None where torch multiplies.

        Args:
            layer: The layer.
            kind: What follows on the product, see ``Product``.
            units: Columns of the product that are no padding.
            first_sum: Column of the sums of GRADIENTS.
        """
        product = Product(layer.sources.shape[1], layer.sources.shape[0], units, kind, self.perceptron.relu)
        env, cores = self.rollout.env, tensor_cores_of(self.rollout)
        if self.dtype != torch.bfloat16 or not product.blocks(cores):
            return None
        blocks = min(cores.multiprocessors * product.blocks(cores), -(-self.chunk // PRODUCT_ROWS))
        launch = env.functions.compile(
            cuda_folder() / "learner/layer_product.cu", kernels=[LAYER_PRODUCT], constants=product.source(cores)
        ).prepare(
            "layer_product",
            LaunchShape(blocks * BLOCK, threads_per_block=BLOCK, shared_bytes=product.shared_bytes),
            parameters=self.parameters.flat,
            weights=layer.part(self._weights),
            bias=max(layer.bias, 0),
            sums_pitch=self.layers.num_sums,
            first_sum=first_sum,
        )
        return ProductLaunch(launch, blocks)

    def begin_rollout(self) -> None:
        """Let the forward passes read the weights as they are now."""
        self.store_weights()

    def run_layers(self, obs: torch.Tensor, indices: torch.Tensor, *, only_critic: bool = False) -> dict[str, object]:
        """The products of the heads for the observations at ``indices`` (rows,), as arguments of kernels.

        Activations stay for the backward pass. Reads the weights of the last ``store_weights``.

        Args:
            obs: (n, *obs_shape), with the rollout's stride.
            indices: (rows,) int64, at most ``chunk``.
            only_critic: Without the actor, if it has a trunk of its own.
        """
        rows = len(indices)
        self._gather(obs=obs, indices=indices, inputs=self._activations[0][0][:rows], rows=rows)
        for tower, layers in enumerate(self.layers.towers):
            if only_critic and tower < len(self.layers.towers) - 1:
                continue
            out = [x[:rows] for x in (*self._activations[tower], self._products[tower])]
            for k, (layer, product) in enumerate(zip(layers, self._forward_products[tower], strict=True)):
                if product is not None:
                    product(out[k], out[k + 1])
                    continue
                multiply(out[k], layer.part(self._weights).T, out=out[k + 1])
                if layer.size >= 0:
                    self._activate(outputs=out[k + 1], bias=layer.bias, size=layer.size, rows=rows)
        actor, critic = self._products[0], self._products[1] if self.perceptron.towers == 2 else None
        return {
            "actor": actor[:rows],
            "critic": None if critic is None else critic[:rows],
            "indices": indices,
            "rows": rows,
        }

    def gradients(self, rows: int, settings: LossSettings) -> tuple[Gradients, torch.Tensor]:
        """The gradients of a minibatch of so many rows, and their output, see ``PerceptronKernels.gradients``."""
        loss = loss_values(self.rollout, settings)
        parts = torch.zeros((1, self.perceptron.num_parameters + METRICS), device=self.device)
        return Gradients(self, rows, loss, parts), parts

    def forward(self, *, num_envs: int | None = None) -> ForwardPass:
        """The forward pass of the observations of one step, see ``PerceptronKernels.forward``."""
        return ForwardPass(self, self.rollout.env.num_envs if num_envs is None else num_envs)


class ProductLaunch:
    """A launch of a product of layer_product.cu.

    Args:
        launch: Its launch.
        blocks: Of the launch.
    """

    def __init__(self, launch: Launch, blocks: int) -> None:
        self._launch, self._blocks = launch, blocks

    def __call__(
        self,
        inputs: torch.Tensor,
        outputs: torch.Tensor,
        *,
        activations: torch.Tensor | None = None,
        sums: torch.Tensor | None = None,
        tile_rows: int | None = None,
    ) -> None:
        """Write the product of ``inputs`` and what follows on it.

        Args:
            inputs: (rows, n).
            outputs: (rows, m).
            activations: (rows, m) of GRADIENTS.
            sums: Of GRADIENTS, see ``activation_gradients`` in layerwise.cu.
            tile_rows: Rows of a sum, a multiple of PRODUCT_ROWS; None: there are no sums.
        """
        rows = len(inputs)
        self._launch(
            inputs=inputs,
            outputs=outputs,
            activations=activations,
            sums=sums,
            tile_rows=tile_rows or PRODUCT_ROWS * -(-rows // (PRODUCT_ROWS * self._blocks)),
            rows=rows,
        )


class ForwardPass:
    """See ``LayerwiseKernels.forward``. Reads the weights as they were at the last ``begin_rollout``."""

    def __init__(self, kernels: LayerwiseKernels, num_envs: int) -> None:
        self._kernels, env, view = kernels, kernels.rollout.env, kernels.policy.view
        rows = torch.arange(num_envs * env.num_agents, device=kernels.device).view(num_envs, env.num_agents)
        self._indices = rows[:, view.agents].flatten().contiguous()
        columns = view.parameter_columns
        columns = torch.arange(columns.stop) if isinstance(columns, slice) else columns
        elements = kernels.chunk * (kernels.perceptron.outputs + 1)
        self._outputs = kernels._program.prepare(
            "head_outputs",
            LaunchShape(elements),
            **kernels._heads,
            choices=env.buffers_layout.num_choices or 0,
            columns=columns.to(kernels.device, torch.int32),
            masked_logit=torch.finfo(torch.float32).min,
        )

    def __call__(
        self,
        *,
        obs: torch.Tensor,
        action_mask: torch.Tensor | None,
        outputs: torch.Tensor | None,
        values: torch.Tensor,
    ) -> None:
        """Write the outputs, if given, and the values of the policy's agents."""
        for indices in self._indices.split(self._kernels.chunk):
            heads = self._kernels.run_layers(obs, indices, only_critic=outputs is None)
            self._outputs(**heads, action_mask=action_mask, outputs=outputs, values=values)


class Gradients:
    """See ``LayerwiseKernels.gradients``."""

    def __init__(self, kernels: LayerwiseKernels, rows: int, loss: dict[str, object], parts: torch.Tensor) -> None:
        self._kernels, self._out, layers, device = kernels, parts[0], kernels.layers, kernels.device
        self._obs = kernels.rollout.flat_obs(kernels.policy.view)
        self.chunk = min(kernels.chunk, rows)
        # A function of the sizes alone, as the order of summation is.
        self._tile_rows: int = LOSS_BLOCK * -(-self.chunk // (LOSS_BLOCK * MAX_TILES))
        self._found = torch.zeros(layers.size, device=device)
        self._head_gradients = [kernels._empty(self.chunk, x.shape[1]) for x in kernels._products]
        widest = max(x.shape[1] for own in kernels._activations for x in own[1:])
        self._deltas = [kernels._empty(self.chunk * widest) for _ in range(2)]
        self._sums = torch.zeros((self._tiles(self.chunk), layers.num_sums), device=device)
        sums = {"sums": self._sums, "tile_rows": self._tile_rows}
        self._loss = kernels._program.prepare(
            "head_loss",
            kernels._blocks(self._tile_rows, LOSS_BLOCK),
            **kernels._heads,
            **loss,
            **sums,
        )
        self._products = [
            [
                kernels.product(layer, "GRADIENTS", kernels.perceptron.sizes[k + 1], tower[k].first_sum)
                for k, layer in enumerate(tower[1:])
            ]
            for tower in layers.towers
        ]
        shape = kernels._blocks(self._tile_rows)
        self._activation = kernels._program.prepare("activation_gradients", shape, **sums)
        columns = layers.num_sums
        results = {
            "trainable": torch.ones(columns, dtype=torch.bool, device=device),
            "squares": torch.zeros(num_squares(columns), dtype=torch.float64, device=device),
        }
        self._add_tiles = {
            tiles: sum_parts_launch(
                kernels.rollout.env.functions,
                self._sums[:tiles],
                **results,
                out=self._found[layers.num_weights :],
                num_squared=0,
            )
            for tiles in {self._tiles(self.chunk), self._tiles(rows % self.chunk or self.chunk)}
        }
        self._collect: Launch = kernels._program.prepare(
            "collect_gradients",
            LaunchShape(len(self._out)),
            found=self._found,
            sources=layers.gradient_sources.to(device),
            out=self._out,
            columns=len(self._out),
        )

    def _tiles(self, rows: int) -> int:
        return -(-rows // self._tile_rows)

    def __call__(self, *, indices: torch.Tensor, moments: torch.Tensor) -> None:
        """Write the gradients and metrics of the samples at ``indices``, see ``PerceptronKernels.gradients``."""
        self._kernels.store_weights()
        for number, chunk in enumerate(indices.split(self.chunk)):
            rows = len(chunk)
            heads = self._kernels.run_layers(self._obs, chunk)
            of_heads = [x[:rows] for x in self._head_gradients]
            actor, *critic = of_heads
            self._loss(**heads, moments=moments, actor_gradients=actor, critic_gradients=critic[0] if critic else None)
            for tower, delta in enumerate(of_heads):
                self._backward(tower, delta)
            self._add_tiles[self._tiles(rows)]()
            self._collect(first=number == 0)

    def _backward(self, tower: int, delta: torch.Tensor) -> None:
        """Gradients of a tower's weights, and sums of those of its biases, from those of the head's outputs."""
        rows, layers = len(delta), self._kernels.layers.towers[tower]
        activations = [x[:rows] for x in self._kernels._activations[tower]]
        for k in reversed(range(len(layers))):
            multiply(delta.T, activations[k], out=layers[k].part(self._found))
            if k == 0:
                return
            below = layers[k - 1]
            before = self._deltas[k % 2][: activations[k].numel()].view(activations[k].shape)
            if product := self._products[tower][k - 1]:
                product(delta, before, activations=activations[k], sums=self._sums, tile_rows=self._tile_rows)
            else:
                torch.mm(delta, layers[k].part(self._kernels._weights), out=before)
                self._activation(
                    gradients=before, outputs=activations[k], size=below.size, first_sum=below.first_sum, rows=rows
                )
            delta = before


def multiply(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> None:
    """Write a @ b to ``out``.

    To a float32 ``out``, products of bfloat16 matrices are rounded to bfloat16 first where torch cannot do otherwise.
    """
    if a.dtype == out.dtype:
        torch.mm(a, b, out=out)
    elif HAS_OUT_DTYPE and a.device.type == "cuda":
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        out.copy_(torch.mm(a, b))
