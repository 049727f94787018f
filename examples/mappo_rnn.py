"""Recurrent MAPPO in one file: own networks, advantages, loss and update loop, on a GPU as two CUDA graphs.

Actors share a network and see their own observations; the critic sees those of all agents, or the state that a game
declares for critics. The trainer of this package takes no part. docs/write_an_algorithm.md explains the file.

    python examples/mappo_rnn.py --game simple_spread --total-steps 1000000

Shapes: T steps in K sequences of L, E environments, A agents, U units, S numbers that the critic sees.
"""

import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import tyro
from torch import nn

from gpu_vecenv import EpisodeLog, RecurrentLayer, Sample, Sampler, VecEnv, configure, evaluate


@dataclass
class Options:
    """Recurrent MAPPO for cooperative games, whose agents are of one role."""

    game: str = "simple_spread"
    num_envs: int = 64  # E
    num_steps: int = 30  # T, of an iteration
    sequence_length: int = 10  # L, of those through which gradients go; a divisor of num_steps
    total_steps: int = 500_000  # env-steps, all environments together
    seed: int = 0  # of everything
    device: str | None = None  # cpu, cuda or cuda:1; by default cuda if usable, else cpu
    graphs: bool = True  # CUDA graphs on a GPU
    units: int = 64  # U, of the layer and of the GRU of each network
    learning_rate: float = 2e-3  # of Adam
    num_epochs: int = 5  # passes over the steps of an iteration
    num_minibatches: int = 4  # of an epoch, a divisor of its sequences, T / L * E
    gamma: float = 0.95  # discount per step
    gae_lambda: float = 0.95  # of generalised advantage estimates
    clip: float = 0.2  # of the probability ratio
    huber_delta: float = 10.0  # errors of values beyond it count linearly
    entropy_coefficient: float = 0.01
    max_grad_norm: float = 10.0  # gradients of each network are scaled down to it
    log_interval: int = 20  # iterations between two lines


class RecurrentNet(nn.Module):
    """A layer, a GRU, a head; on a GPU the GRU is a kernel, one launch for all steps."""

    def __init__(self, env: VecEnv, inputs: int, units: int, outputs: int, head_gain: float) -> None:
        super().__init__()
        self.layer, self.gru = nn.Linear(inputs, units), RecurrentLayer(units, units, env=env)
        self.head = nn.Linear(units, outputs)
        for linear, gain in ((self.layer, math.sqrt(2)), (self.head, head_gain)):
            nn.init.orthogonal_(linear.weight, gain)
            nn.init.zeros_(linear.bias)

    def forward(self, x: torch.Tensor, state: torch.Tensor, first: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs (steps, rows, n), and the state (rows, U) that the last step leaves.

        Args:
            x: (steps, rows, inputs).
            state: (rows, U), which the step before these left.
            first: (steps, rows) bool, where x is the first of an episode: it meets a state of 0.
        """
        state = torch.where(first[0, :, None], 0, state)
        is_kept = torch.cat([~first[1:], torch.ones_like(first[:1])])  # the state after each step
        features = self.gru.sequence(self.layer(x.float()).relu(), state, is_kept)
        return self.head(features), features[-1]


def log_probs_and_entropies(
    parameters: torch.Tensor, draws: torch.Tensor, choices: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of ``draws`` (…[, heads]), summed over the heads, given the ``parameters`` (…, P) of a ``Sampler``.

    These are logits of each head's ``choices``; without any, means and logarithms of standard deviations.
    """
    if not choices:
        means, log_stds = parameters.chunk(2, -1)
        constant = 0.5 * math.log(2 * math.pi)
        log_probs = -0.5 * ((draws - means) / log_stds.exp()).square() - log_stds - constant
        return log_probs.sum(-1), (log_stds + constant + 0.5).sum(-1)
    of_heads = draws.long().unbind(-1) if draws.ndim == parameters.ndim else [draws.long()]
    log_probs, entropies = [], []
    for logits, choice in zip(parameters.split(choices, -1), of_heads, strict=True):
        normalised = logits.log_softmax(-1)
        log_probs.append(normalised.gather(-1, choice[..., None]).squeeze(-1))
        entropies.append(-(normalised.exp() * normalised).sum(-1))
    return torch.stack(log_probs).sum(0), torch.stack(entropies).sum(0)


class Graphed:
    """A function without arguments: its first call, a warm-up, runs eagerly; from the second on it is a CUDA graph."""

    def __init__(self, function: Callable[[], None], enabled: bool) -> None:
        self.function, self.enabled, self.is_warm = function, enabled, False
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        """Run, or replay."""
        if self.enabled and self.is_warm and self.graph is None:
            graph = torch.cuda.CUDAGraph()
            gc.collect()
            gc.disable()  # what a destructor calls could not be captured
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
                self.function()  # is recorded, not run
            gc.enable()
            self.graph = graph
        if self.graph is None:
            self.function()
            self.is_warm = True
        else:
            self.graph.replay()


class Rollout:
    """T steps. Of what precedes a step there are T + 1 rows: the last of one rollout is the first of the next."""

    def __init__(self, env: VecEnv, num_steps: int) -> None:
        self.env, action, like = env, env.layout.action, env.step_buffers()
        before, after = ("obs", "active", "acting", "action_mask"), ("rewards", "terminations", "truncations")
        rows = {name: num_steps + (name in before) for name in (*before, *after) if getattr(like, name) is not None}
        tensors = {name: torch.stack([getattr(like, name)] * count).zero_() for name, count in rows.items()}
        self.step_buffers = [  # into which the environment writes: nothing is copied
            env.step_buffers(**{name: x[t + (name in before)] for name, x in tensors.items()}) for t in range(num_steps)
        ]
        self.last = env.step_buffers(**{name: x[-1] for name, x in tensors.items()})
        self.obs, self.active = tensors["obs"], tensors["active"]
        self.acting, self.action_mask = tensors.get("acting", self.active), tensors.get("action_mask")
        self.rewards, self.terminations, self.truncations = (tensors[name] for name in after)

        self.first = torch.ones((num_steps + 1, env.num_envs), dtype=torch.bool, device=env.device)  # an episode begins
        self.values = torch.zeros(self.active.shape, device=env.device)
        self.log_probs, self.advantages = torch.zeros((2, *self.rewards.shape), device=env.device)
        kind = {"dtype": torch.int32 if action.discrete else torch.float32, "device": env.device}
        self.draws = torch.zeros((*self.rewards.shape, *action.shape), **kind)  # actions; of a Box, before clipping
        clipped = torch.zeros_like(self.draws[0])
        self.samples = [
            Sample(draws, log_probs) if action.discrete else Sample(clipped, log_probs, None, draws)
            for draws, log_probs in zip(self.draws, self.log_probs, strict=True)
        ]
        # What the critic sees, (T + 1, E, S): the observations of all agents, or what the game declares for critics.
        self.states = self.obs.flatten(2)
        self.critic_fields = (*env.game.critic_state, *env.game.agent_critic_state)
        if self.critic_fields:
            size = sum(env.state[name][0].numel() for name in self.critic_fields)
            self.states = torch.zeros((*self.first.shape, size), device=env.device)

    def keep_state(self, t: int) -> None:
        """Store what the critic sees of the environment as it is, if that is not the observations."""
        if names := self.critic_fields:
            fields = [self.env.state[name].reshape(len(self.states[t]), -1).float() for name in names]
            torch.cat(fields, 1, out=self.states[t])

    def carry_over(self) -> None:
        """Copy row T to row 0."""
        for x in (self.obs, self.active, self.acting, self.action_mask, self.first, self.states):
            if x is not None:
                x[0].copy_(x[-1])


class MAPPO:
    """The algorithm. ``collect`` and ``update`` use the same tensors in each call, and read none on the host."""

    def __init__(self, env: VecEnv, options: Options) -> None:
        sequences = options.num_steps // options.sequence_length * env.num_envs
        if options.num_steps % options.sequence_length or sequences % options.num_minibatches:
            raise SystemExit("expected a sequence_length that divides num_steps, num_minibatches that divide sequences")
        self.env, self.options, self.sampler, device = env, options, Sampler(env), env.device
        self.data = data = Rollout(env, options.num_steps)
        self.choices = tuple(env.layout.action.head_sizes)  # of each discrete head; none of a Box
        E, A, U, L = env.num_envs, env.num_agents, options.units, options.sequence_length
        self.actor = RecurrentNet(env, data.obs[0, 0, 0].numel(), U, self.sampler.num_parameters, 0.01).to(device)
        self.critic = RecurrentNet(env, data.states.shape[-1], U, A, 1.0).to(device)  # its rows are environments
        self.actor_state, self.critic_state = torch.zeros((E, A, U), device=device), torch.zeros((E, U), device=device)
        self.actor_starts, self.critic_starts = (  # with which sequences begin
            torch.stack([state] * (options.num_steps // L)) for state in (self.actor_state, self.critic_state)
        )
        weights, on_gpu = [*self.actor.parameters(), *self.critic.parameters()], device.type == "cuda"
        self.optimizer = torch.optim.Adam(weights, options.learning_rate, eps=1e-5, fused=True, capturable=on_gpu)
        self.num_sequences, count = sequences, options.num_minibatches
        shape = options.num_epochs * count, sequences // count
        self.minibatches = torch.zeros(shape, dtype=torch.int64, device=device)  # the sequences of each
        self.metrics = torch.zeros(4, device=device)
        env.reset(seed=options.seed, out=data.last)
        data.keep_state(-1)

    def policy(
        self, obs: torch.Tensor, state: torch.Tensor, first: torch.Tensor, action_mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Parameters (steps, n, A, P) for n environments, and the state (n, A, U) that the last step leaves.

        Environments and agents are independent rows of the network, on one axis.
        """
        first = first[..., None].expand(obs.shape[:3])
        outputs, after = self.actor(obs.flatten(3).flatten(1, 2), state.flatten(0, 1), first.flatten(1))
        parameters = outputs.unflatten(1, obs.shape[1:3])
        if action_mask is not None:
            parameters = torch.where(action_mask, parameters, -1e4)  # probability 0; infinity would make entropies NaN
        return parameters, after.view_as(state)

    @torch.no_grad()
    def collect(self) -> None:
        """Play T steps and estimate their advantages."""
        data, masks, state, length = self.data, self.data.action_mask, self.actor_state, self.options.sequence_length
        data.carry_over()
        for t, (sample, buffers) in enumerate(zip(data.samples, data.step_buffers, strict=True)):
            if t % length == 0:
                self.actor_starts[t // length].copy_(state)
            row = slice(t, t + 1)  # a sequence of one step
            mask = None if masks is None else masks[row]
            parameters, state = self.policy(data.obs[row], state, data.first[row], mask)
            self.sampler.step(parameters[0], sample=sample, out=buffers)  # draws actions and steps: one kernel
            data.keep_state(t + 1)
            torch.logical_not(data.active[t].any(1), out=data.first[t + 1])  # no agent was active: it was a reset
        self.actor_state.copy_(state)

        # Values are not needed to act. Row T is a step of the next rollout: its value is needed here, its state is not.
        state = self.critic_state
        for k, start in enumerate(self.critic_starts):
            rows = slice(k * length, (k + 1) * length)
            start.copy_(state)
            data.values[rows], state = self.critic(data.states[rows], state, data.first[rows])
        data.values[-1:], _ = self.critic(data.states[-1:], state, data.first[-1:])
        self.critic_state.copy_(state)
        self.estimate_advantages()

    def estimate_advantages(self) -> None:
        """Generalised advantage estimates; 0 where an agent was not active.

        The last observation of an episode is row t + 1, and has a value like any other. Where the episode terminated it
        counts as 0; where it was truncated it stays. No estimate reaches across an end.
        """
        data, gamma, gae_lambda = self.data, self.options.gamma, self.options.gae_lambda
        active, ended = data.active[:-1], data.terminations | data.truncations
        next_values = torch.where(data.terminations, 0, data.values[1:])
        errors = torch.where(active, data.rewards + gamma * next_values - data.values[:-1], 0)
        decays = gamma * gae_lambda * (active & ~ended)
        estimate = torch.zeros_like(errors[0])
        for t in reversed(range(len(errors))):
            estimate = errors[t] + decays[t] * estimate
            data.advantages[t].copy_(estimate)

    def shuffle(self) -> None:
        """Draw the minibatches of all epochs, on the host: a graph would repeat one order."""
        epochs = [torch.randperm(self.num_sequences) for _ in range(self.options.num_epochs)]
        self.minibatches.copy_(torch.cat(epochs).view_as(self.minibatches))

    def update(self) -> None:
        """Take a step of Adam for each minibatch of sequences."""
        data, acted = self.data, (self.data.active & self.data.acting)[:-1]
        returns = data.advantages + data.values[:-1]
        centred = data.advantages - masked_mean(data.advantages, acted)
        advantages = centred / (masked_mean(centred.square(), acted).sqrt() + 1e-8)
        for sequences in self.minibatches:
            loss = self.loss(sequences, advantages, returns)
            self.optimizer.zero_grad()
            loss.backward()
            for network in (self.actor, self.critic):
                nn.utils.clip_grad_norm_(network.parameters(), self.options.max_grad_norm)
            self.optimizer.step()

    def loss(self, sequences: torch.Tensor, advantages: torch.Tensor, returns: torch.Tensor) -> torch.Tensor:
        """Of some sequences (n,), numbered from 0 to K * E; they begin with the states that the rollout had there."""
        data, options, num_envs = self.data, self.options, self.env.num_envs
        k, env = sequences // num_envs, sequences % num_envs

        def of(x: torch.Tensor) -> torch.Tensor:
            """Their steps (L, n, …) of T or T + 1 rows."""
            return x[: len(returns)].unflatten(0, (-1, options.sequence_length))[k, :, env].transpose(0, 1)

        active, first, mask = of(data.active), of(data.first), data.action_mask
        acted = active & of(data.acting)  # agents that are active but do not act receive rewards: their values count
        parameters, _ = self.policy(of(data.obs), self.actor_starts[k, env], first, None if mask is None else of(mask))
        values, _ = self.critic(of(data.states), self.critic_starts[k, env], first)

        log_probs, entropies = log_probs_and_entropies(parameters, of(data.draws), self.choices)
        log_ratio = torch.where(acted, log_probs - of(data.log_probs), 0)
        ratio, advantages = log_ratio.exp(), of(advantages)
        surrogate = ratio * advantages
        surrogate_clipped = ratio.clamp(1 - options.clip, 1 + options.clip) * advantages
        policy_loss = masked_mean(-torch.minimum(surrogate, surrogate_clipped), acted)
        errors = nn.functional.huber_loss(values, of(returns), reduction="none", delta=options.huber_delta)
        value_loss, entropy = masked_mean(errors, active), masked_mean(entropies, acted)
        approx_kl = masked_mean(ratio - 1 - log_ratio, acted)
        self.metrics.copy_(torch.stack([policy_loss, value_loss, entropy, approx_kl]).detach())
        return policy_loss + value_loss - options.entropy_coefficient * entropy


def masked_mean(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean of ``x`` where the mask is True."""
    return torch.where(mask, x, 0).sum() / mask.sum().clamp(min=1)


def main(options: Options) -> None:
    """Train, and compare with random actions."""
    torch.manual_seed(options.seed)
    env = VecEnv(configure(options.game), options.num_envs, options.device, autoreset_mode="next_step")
    roles, graphs = list(env.layout.present_roles), options.graphs and env.device.type == "cuda"
    if len(roles) > 1:
        raise SystemExit(f"{options.game} has the roles {roles}; expected a game of one role")
    if graphs:  # which cannot be captured on the default stream
        stream = torch.cuda.Stream(env.device)
        stream.wait_stream(torch.cuda.current_stream(env.device))
        torch.cuda.set_stream(stream)
    name = f"return_{roles[0]}"
    at_random = evaluate(env, {roles[0]: None}, episodes=1000, seed=options.seed + 1)[name]

    mappo = MAPPO(env, options)
    collect, update, log = Graphed(mappo.collect, graphs), Graphed(mappo.update, graphs), EpisodeLog(env)
    steps = options.num_steps * env.num_envs
    iterations, start = math.ceil(options.total_steps / steps), time.perf_counter()
    for iteration in range(1, iterations + 1):
        collect()
        mappo.shuffle()
        update()
        if (iterations - iteration) % options.log_interval == 0:  # the only lines that wait for the device
            env.raise_for_faults()
            policy_loss, value_loss, entropy, approx_kl = mappo.metrics.tolist()
            trained, seconds = log.means()[name].item(), time.perf_counter() - start
            print(
                f"{iteration * steps:,} env-steps, {iteration * steps / seconds:,.0f} per second: return {trained:.2f}"
            )
            print(f"  losses {policy_loss:.3f} {value_loss:.2f}, entropy {entropy:.2f}, approx. KL {approx_kl:.4f}")
    print(f"mean return of an agent: {at_random:.2f} by random actions, {trained:.2f} trained")


if __name__ == "__main__":
    main(tyro.cli(Options))
