"""Fixed opponents: what each role that a trainer trains is evaluated against, while and after it learns."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from gpu_vecenv.declare.env import Env
from gpu_vecenv.errors import CheckpointCorruptError, ConfigError, nearest
from gpu_vecenv.train.evaluation import RolePolicy, replaced
from gpu_vecenv.train.evaluation_curves import FROZEN, NONE
from gpu_vecenv.train.fixed_policy import RANDOM, STILL, FixedPolicy, noop_of
from gpu_vecenv.train.policy import Policy
from gpu_vecenv.train.role_view import agents_of, role_of, sides_with_returns
from gpu_vecenv.train.scripts import Script
from gpu_vecenv.train.trainer import Trainer

INITIAL = "initial"  # the policies with which the run began
KINDS = (RANDOM, STILL, INITIAL)


class Match(NamedTuple):
    """A role that is trained, or a player of a zero-sum game of one role, and a fixed opponent of it."""

    role: str
    opponent: str

    @property
    def name(self) -> str:
        """In tables."""
        return f"{self.role} against {self.opponent}"


def parsed_scripts(texts: Sequence[str]) -> tuple[Script, ...]:
    """The scripts that texts such as "runner=file.py:function" name.

    Raises:
        ConfigError: A text has another form, or a name is that of another opponent of the same agents.
    """
    found = [Script.parsed("eval_scripts", text) for text in texts]
    names = [(script.agents, script.name) for script in found]
    taken = {*KINDS, FROZEN, NONE}
    if wrong := [name for name in names if name[1] in taken or names.count(name) > 1]:
        raise ConfigError(
            f"eval_scripts has an opponent {wrong[0][1]!r} of {wrong[0][0]}; expected names that are used once and "
            f"none of {', '.join(KINDS)}: rename the function"
        )
    return tuple(found)


class FixedOpponents:
    """The fixed opponents of each role that a trainer trains, and who acts in a match against one.

    In a zero-sum game of one role each of its two agents stands for a role here: see ``sides_with_returns``.

    In a match the policies of one role act as they are now. The agents of other roles that learn are played by the
    opponent: "random", uniform actions; "still", the no-op that the game declares; "initial", the policies with which
    the run began. A script plays its own agents, and those that learn beside it act randomly. Frozen policies act as
    they are.

    Where all others are frozen, "frozen" is the match as in training, which alone counts, with scripts, for the best
    checkpoint; "random" and "still" play in place of the frozen policies. "initial" would be "frozen" again, and so
    would "random" and "still" where they play all others in training: no match is against these. Where there are no
    other roles, the single opponent without a script is "none". Of populations the first members act.

    Attributes:
        matches: All of them.
        left_out: Those of ``kinds`` that no match is against -> why.

    Args:
        trainer: The trainer; a new one, whose policies are those with which the run begins.
        kinds: Some of "random", "still" and "initial"; "still" is left out where the game declares no ``noop``.
        scripts: Further opponents.

    Raises:
        ConfigError: There is no such kind, script, role or agent, or a script plays against no role that is trained.
    """

    def __init__(self, trainer: Trainer, kinds: Sequence[str] = KINDS, scripts: Sequence[Script] = ()) -> None:
        if wrong := [kind for kind in kinds if kind not in KINDS or kinds.count(kind) > 1]:
            raise ConfigError(f"eval_opponents has {wrong[0]!r}; expected some of {', '.join(KINDS)}, each once")
        self._trainer, game = trainer, trainer.env.game
        self._kinds, self._actors = tuple(kinds), trainer.role_policies()
        names = dict.fromkeys(name for learner in trainer.learners.values() for name in learner.policy.view.names)
        # Of each side what is trained of it: the side itself where a policy is of more agents, else names of policies.
        self._trained = {side: _parts(game, names, side) for side in sides_with_returns(game)}
        self._acting = {side: _parts(game, self._actors, side) for side in self._trained}
        self._roles = [role for role, trained in self._trained.items() if trained]
        self._scripts: dict[Match, tuple[str, RolePolicy]] = {}
        self.matches: list[Match] = []
        for role in self._roles:
            self.matches += [Match(role, kind) for kind in kinds if not self._why_not(role, kind)]
            if not self._learning_others(role):
                self.matches.append(Match(role, FROZEN if self._others(role) else NONE))
        self.left_out = {
            kind: self._why_not(self._roles[0], kind) for kind in kinds if self._roles and not self.is_against(kind)
        }
        self._initial = (
            {name: copy.deepcopy(trainer.policies[name]) for name in trainer.acting_members()}
            if self.is_against(INITIAL)
            else dict[str, Policy]()
        )
        self._add_scripts(scripts)

    def _learning_others(self, role: str) -> list[str]:
        return [name for other, trained in self._trained.items() if other != role for name in trained]

    def _others(self, role: str) -> list[str]:
        """Whom an opponent of a role plays: the others that learn, or all others where none of them does."""
        every = [name for other, acting in self._acting.items() if other != role for name in acting]
        return self._learning_others(role) or every

    def _why_not(self, role: str, kind: str) -> str:
        """Why a role has no match against a kind of opponents; empty if it has one. May raise for a wrong ``noop``."""
        game, others = self._trainer.env.game, self._others(role)
        if not others:
            return "there is no other role"
        lacking = [name for name in others if not _can_stand(game, role_of(game, name))] if kind == STILL else []
        if lacking:
            return f"the game declares no noop of {lacking[0]}"
        if self._learning_others(role):
            return ""
        if kind == INITIAL:
            return f"{'+'.join(others)} is frozen and stays as it began"
        return f"{kind} plays {'+'.join(others)} in training" if self._kinds_of(others) == {kind} else ""

    def _kinds_of(self, names: Sequence[str]) -> set[str | None]:
        """What plays these agents in training, of policies without a network their ``kind``."""
        game = self._trainer.env.game
        agents = {*agents_of(game, names)}
        return {
            policy.kind if isinstance(policy, FixedPolicy) else None
            for name, policy in self._actors.items()
            if agents & {*agents_of(game, [name])}
        }

    def check_used(self) -> None:
        """Refuse a selection of ``kinds`` that leaves no match against any of them; the default is no selection.

        Raises:
            ConfigError: It does.
        """
        if not self.left_out or {*self._kinds} == {*KINDS} or any(map(self.is_against, self._kinds)):
            return
        reasons = "; ".join(f"{kind}: {reason}" for kind, reason in self.left_out.items())
        usable = [kind for kind in KINDS if any(not self._why_not(role, kind) for role in self._roles)]
        expected = f"expected one of {', '.join(usable)}, or none" if usable else "leave it out"
        raise ConfigError(
            f"eval_opponents is {' '.join(self._kinds)}, and no evaluation is against it ({reasons}); {expected}"
        )

    def _add_scripts(self, scripts: Sequence[Script]) -> None:
        game = self._trainer.env.game
        known = [*game.layout.present_roles, *game.layout.agent_names]
        for script in scripts:
            agents, source = script
            if agents not in known:
                raise ConfigError(f"eval_scripts has {agents!r}; {nearest(agents, known)}")
            actor, own = script.actor("eval_scripts", game), {*agents_of(game, [agents])}
            trained = [side for side, names in self._trained.items() if names]
            against = [side for side in trained if own.isdisjoint(agents_of(game, [side]))]
            if not against:
                one = f"; expected a single agent, such as {trained[-1]}={source}" * (len(trained) > 1)
                raise ConfigError(f"eval_scripts: {source} plays {agents}, against whom no other role is trained{one}")
            for role in against:
                match = Match(role, script.name)
                if match in self._scripts:
                    raise ConfigError(f"eval_scripts has two opponents {match.opponent!r} of {role}; rename a function")
                self._scripts[match] = agents, actor
                self.matches.append(match)

    def load_initial(self, tensors: Mapping[str, torch.Tensor], where: str) -> None:
        """Take the weights of "initial" from a checkpoint.

        Raises:
            CheckpointCorruptError: It is of other policies.
        """
        for name, policy in self._initial.items():
            start = f"policy.{name}."
            own = {key.removeprefix(start): tensor for key, tensor in tensors.items() if key.startswith(start)}
            try:
                policy.load_state_dict(own)
            except RuntimeError as error:
                raise CheckpointCorruptError(f"{where} is of other policies than {name}: {error}") from error

    def is_against(self, kind: str) -> bool:
        """Whether any match is against this opponent."""
        return any(match.opponent == kind for match in self.matches)

    def role_policies(self, match: Match) -> dict[str, RolePolicy]:
        """The actors of a match, for ``evaluate``."""
        trainer, game = self._trainer, self._trainer.env.game
        scripted = match in self._scripts
        only_learning = scripted or match.opponent in (FROZEN, NONE)
        others = self._learning_others(match.role) if only_learning else self._others(match.role)
        playing: dict[str, RolePolicy] = dict.fromkeys(others)  # random actions
        if match.opponent == STILL:
            playing = dict.fromkeys(others, STILL)
        elif match.opponent == INITIAL:
            initial = {name: policy for policy in self._initial.values() for name in policy.view.names}
            playing = {name: initial[name if name in initial else role_of(game, name)] for name in others}
        found = replaced(game, trainer.role_policies(), playing)
        if scripted:
            agents, actor = self._scripts[match]
            return replaced(game, found, {agents: actor})
        return found

    def replaces(self, match: Match) -> bool:
        """Whether the opponent differs from the policies that are trained, or frozen, beside the role."""
        return match in self._scripts or match.opponent not in (FROZEN, NONE)

    def is_scored(self, match: Match) -> bool:
        """Whether the match counts for the best checkpoint."""
        # A role beside frozen ones learns to play with these: how it plays with others is only reported.
        return match in self._scripts or match.opponent == FROZEN or Match(match.role, FROZEN) not in self.matches


def _can_stand(game: Env, role: str) -> bool:
    """Whether the game declares a ``noop`` of a role. Raises ConfigError if that is no action of the role."""
    declared = game.noop is not None and (not isinstance(game.noop, Mapping) or role in game.noop)
    return declared and bool(noop_of(game, role))


def _parts(game: Env, names: Iterable[str], side: str) -> list[str]:
    """The roles and agents of ``names`` that are of this side; the side where one of them has it and other agents."""
    own = {*agents_of(game, [side])}
    found = list[str]()
    for name in names:
        agents = {*agents_of(game, [name])}
        if own & agents:
            found.append(name if agents <= own else side)
    return found
