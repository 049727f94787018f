"""Policies without a network: what they do, whom they train, what a checkpoint has of them, and what is refused."""

import json

import pytest
import torch
from games.race import Race
from support.bitwise import equal_bits
from support.training import SMALL, leaving

import gpu_vecenv
from gpu_vecenv import Opponent, OpponentsConfig, PolicySpec, PPOConfig, Trainer, evaluate, load_policy
from gpu_vecenv.errors import CheckpointCorruptError, ConfigError
from gpu_vecenv.train.checkpoint import load_checkpoint, save_checkpoint
from gpu_vecenv.train.export import export
from gpu_vecenv.train.fixed_policy import FixedPolicy

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("error:the rollout cannot be captured"),
]

TINY = PPOConfig(total_steps=10**6, num_steps=8, num_epochs=1, num_minibatches=1, hidden_sizes=(8,))
ENVS = 16


def east(obs):
    """A script: the first move."""
    return torch.ones(obs.shape[:2], dtype=torch.int32, device=obs.device)


def trainer(device, actor, game="tag_gridworld", role="runner", config=TINY, **options):
    """In which an actor plays a role, and another one learns."""
    settings = {"max_steps": 5} if game == "tag_gridworld" else {}
    env = gpu_vecenv.make(game, ENVS, device, **settings)
    others = [name for name in env.game.layout.present_roles if name != role]
    policies = {role: PolicySpec(actor=actor), **{name: PolicySpec() for name in others}}
    return Trainer(env, config, seed=3, policies=policies, **options)


@pytest.mark.parametrize("actor", ["random", "still", east], ids=["random", "still", "script"])
def test_an_actor_plays_its_role_in_all_environments_and_the_other_learns(actor, device):
    one = trainer(device, actor)
    before = {name: x.clone() for name, x in one.policies["tagger"].state_dict().items()}
    found = []
    for _ in range(4):
        one.train_iteration()
        found.append(one.rollout.draws[..., 4][one.rollout.active[:-1, :, 4]])
    counts = torch.bincount(torch.cat(found), minlength=5)
    assert list(one.learners) == ["tagger"] and not equal_bits(before, one.policies["tagger"].state_dict())
    assert isinstance(one.policies["runner"], FixedPolicy) and not one.policies["runner"].state_dict()
    if actor == "random":
        assert counts.min() > 0.12 * counts.sum()  # of about 400, in which 5 choices are equally likely
    else:
        assert counts.nonzero()[:, 0].tolist() == [0 if actor == "still" else 1]
    if device != "cpu":
        assert one.rollout_reason == "a policy without a kernel of its own: no network"


def test_a_box_is_drawn_from_all_of_it(device):
    env = gpu_vecenv.make("simple_tag", ENVS, device, continuous_actions=True)
    one = Trainer(env, TINY, policies={"adversary": PolicySpec(actor="random"), "agent": PolicySpec(actor="still")})
    one.begin_iteration()
    actions, active = one.rollout.samples[-1].actions, one.rollout.active[-2]  # the last step's
    random, still = (actions[:, own][active[:, own]] for own in (slice(3), slice(3, None)))
    assert 0 <= float(random.min()) < 0.1 and 0.9 < float(random.max()) <= 1 and abs(float(random.mean()) - 0.5) < 0.1
    assert len(still) and not still.any()


@pytest.mark.parametrize("actor", ["random", "still", east], ids=["random", "still", "script"])
@pytest.mark.parametrize("pool", [False, True], ids=["alone", "with opponents"])
def test_a_resumed_trainer_goes_on_bit_by_bit(actor, pool, device, tmp_path):
    members = ("random", Opponent(name="x", actors={"runner": "still"}))
    opponents = OpponentsConfig(share=0.5, num_ranges=4, members=members, reassign_interval=1) if pool else None
    whole, resumed = (trainer(device, actor, opponents=opponents) for _ in range(2))
    for _ in range(3):
        whole.train_iteration()
    path = whole.save(tmp_path / "checkpoint")
    resumed.train_iteration()
    resumed.load(path)
    for _ in range(3):
        for one in (whole, resumed):
            one.train_iteration()
        assert equal_bits(whole.state()[0], resumed.state()[0])
    other = trainer(device, east if actor == "still" else "still", opponents=opponents)
    with pytest.raises(ConfigError, match=r"its actors\.runner is "):
        other.load(path)


def test_opponents_replace_an_actor_in_their_environments(device):
    own = Opponent(name="east", actors={"runner": east})
    kinds = {"random": None, "east": 1}
    for member in ("random", own):
        opponents = OpponentsConfig(share=0.5, num_ranges=2, members=(member,))
        one = trainer(device, "still", opponents=opponents)
        one.begin_iteration()
        draws, active = one.rollout.draws[..., 4], one.rollout.active[:-1, :, 4]
        assert not draws[:, :8][active[:, :8]].any()
        expected = kinds[member if isinstance(member, str) else member.name]
        drawn = draws[:, 8:][active[:, 8:]].unique().tolist()
        assert drawn == [expected] if expected is not None else len(drawn) == 5


def test_snapshots_where_no_other_policy_learns_are_refused(device):
    opponents = OpponentsConfig(share=0.5, num_ranges=2, members=("snapshots",))
    with pytest.raises(ConfigError, match="'snapshots' plays against no side that learns; these are tagger"):
        trainer(device, "still", opponents=opponents)


@pytest.mark.parametrize("actor", ["random", "still", None])
def test_words_are_actors_of_opponents(actor, device):
    opponents = OpponentsConfig(share=1, num_ranges=1, members=(Opponent(name="x", actors={"runner": actor}),))
    one = trainer(device, east, opponents=opponents)
    one.begin_iteration()
    drawn = one.rollout.draws[..., 4][one.rollout.active[:-1, :, 4]].unique().tolist()
    assert drawn == ([0] if actor == "still" else [0, 1, 2, 3, 4])


@pytest.mark.parametrize("actor", ["random", "still"])
def test_a_checkpoint_has_all_that_a_word_needs(actor, device, tmp_path):
    one = trainer(device, actor)
    one.train_iteration()
    policy = load_policy(one.save(tmp_path / "checkpoint"), device=device)
    env = one.env
    for actors in (policy, {"tagger": policy["tagger"], "runner": actor}):
        assert evaluate(env, actors, 20, seed=4) == evaluate(env, one.role_policies(), 20, seed=4)
    actions = policy(env.reset(seed=1)[0])
    assert actions.shape == (ENVS, 5) and int(actions.min()) >= 0 and int(actions.max()) < 5
    assert actor == "random" or not actions[:, 4].any()
    (file,) = export(policy, tmp_path / "files", "torchscript")
    described = json.loads((tmp_path / "files" / "policy.json").read_text())
    assert file.path.name == "tagger.pt" and list(described["policies"]) == ["tagger"]


def test_a_checkpoint_has_no_function(device, tmp_path):
    one = trainer(device, east)
    path = one.save(tmp_path / "checkpoint")
    policy = load_policy(path, device=device)
    message = "runner was played by a function in training, which the checkpoint does not have; give what plays"
    with pytest.raises(ConfigError, match=message):
        evaluate(one.env, policy, 2)
    with pytest.raises(ConfigError, match=message):
        policy(one.env.reset(seed=1)[0])
    assert evaluate(one.env, {**policy.policies, "runner": east}, 9) == evaluate(one.env, one.role_policies(), 9)
    tensors, manifest = load_checkpoint(path)
    for wrong in ({"runner": "anything"}, [1]):
        save_checkpoint(tmp_path / "damaged", tensors, {**manifest, "actors": wrong})
        with pytest.raises(
            CheckpointCorruptError, match=r"actors is .*; expected policies with random, still, function"
        ):
            load_policy(tmp_path / "damaged", device=device)


def test_several_heads_and_boxes_are_acted_for(device, monkeypatch):
    env = leaving(device)
    monkeypatch.setattr(type(env.game), "noop", (1, 3))
    obs = env.reset(seed=1)[0]
    still, random = (FixedPolicy(env.game, ["runner"], actor, device=device) for actor in ("still", "random"))
    own = still.view.obs(obs)
    assert still.act(own).tolist() == [[[1, 3]] * own.shape[1]] * len(own)
    assert random.act(own).shape == still.act(own).shape and random.act(own[0]).shape == still.act(own[0]).shape
    with pytest.raises(ConfigError, match="without a network; expected act"):
        still(own)
    box = gpu_vecenv.make("simple_tag", 64, device, continuous_actions=True)
    policy = FixedPolicy(box.game, ["agent"], "random", device=device)
    actions = policy.act(policy.view.obs(box.reset(seed=1)[0]))
    assert actions.dtype is torch.float32 and 0 <= float(actions.min()) < 0.2 < 0.8 < float(actions.max()) <= 1


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: PolicySpec(actor="anyone"), ConfigError, "actor is 'anyone'; expected 'random' or 'still', or a func"),
        (lambda: PolicySpec(actor=3), TypeError, "actor is a int; expected 'random' or 'still', or a function"),
        (
            lambda: PolicySpec(
                actor=FixedPolicy(gpu_vecenv.make("tag_gridworld", 1, "cpu").game, ["runner"], "random")
            ),
            TypeError,
            r"is a FixedPolicy; .*of a Policy give weights=policy.state_dict\(\)",
        ),
        (lambda: PolicySpec(actor=east, weights={}), ConfigError, "has an actor and weights; expected one of them"),
        (lambda: PolicySpec(actor=east, population=2), ConfigError, "has an actor and population; expected one"),
        (
            lambda: Opponent(name="x", actors={"runner": "anyone"}),
            ConfigError,
            "of 'runner' of Opponent 'x' is 'anyone'; expected 'random', 'still', a Policy",
        ),
    ],
)
def test_wrong_actors_are_refused(make, kind, message):
    with pytest.raises(kind, match=message):
        make()


def test_what_an_actor_lacks_is_refused(device):
    policies = {"player_0": PolicySpec(), "player_1": PolicySpec(actor="still")}
    with pytest.raises(ConfigError, match="'still' is given, but Race declares no noop of 'player'"):
        Trainer(gpu_vecenv.make(Race, 6, device), SMALL, policies=policies)
    env = gpu_vecenv.make("tag_gridworld", 4, device)
    with pytest.raises(ConfigError, match="the actor of runner is 'anyone'; expected 'random', 'still' or a function"):
        evaluate(env, {"tagger": None, "runner": "anyone"}, 2)
    with pytest.raises(ConfigError, match=r"test_fixed_policies\..*<lambda> raised ValueError: .*could not convert"):
        evaluate(env, {"tagger": None, "runner": lambda obs: float("wrong")}, 2)
    one = trainer(device, lambda obs: obs)
    with pytest.raises((TypeError, ValueError), match="the function of 'runner': actions"):
        one.train_iteration()
