"""``gpu-vecenv train --schedules``: from files and JSON, refusals, and resumes."""

import csv
import json
import re
import sys

import pytest
from support.runs import cut_run, resume_elsewhere

from gpu_vecenv import Curriculum, PiecewiseLinear
from gpu_vecenv.cli.curriculum import curriculum_of
from gpu_vecenv.cli.train import Train
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.train.plots import METRICS_FILE

pytestmark = pytest.mark.usefixtures("one_thread", "without_pictures")

TINY = "tag_gridworld --max-steps 5 --num-envs 16 --num-steps 4 --num-minibatches 2 --num-epochs 1 --hidden-sizes 8"
KEPT = "--checkpoint-seconds 0 --keep 100 --digests --episodes 4 --best-episodes 0 --total-steps 512"
ITERATIONS = 8
OVERCOOKED = {"ppo": [], "mappo": ["--preset", "mappo"], "pqn": ["--algorithm", "pqn"]}
LINES = {"clip": [[0, 0.3], [0.5, 0.1]], "learning_rate": [[0, 0.01], [1, 0]]}
SOURCE = """from gpu_vecenv import ByMetric, Curriculum, PiecewiseLinear


def follow(value):
    return 0.01 * abs(value)


def curriculum():
    return Curriculum(
        config={
            "clip": PiecewiseLinear([(0, 0.3), (0.5, 0.1)]),
            "entropy_coefficient": ByMetric("return_tagger", follow, start=1),
        }
    )


ready = curriculum()
other = Curriculum()
number = 3


def fails():
    raise RuntimeError("no idea")


def gives_none():
    pass
"""


def table(run):
    with (run / METRICS_FILE).open() as file:
        return list(csv.DictReader(file))


@pytest.fixture
def source(tmp_path):
    """A file's name, which no other test has: modules stay imported."""
    (tmp_path / f"{tmp_path.name}.py").write_text(SOURCE)
    return f"{tmp_path.name}.py"


@pytest.fixture
def train(command, device):
    return lambda *options: command("train", *TINY.split(), *KEPT.split(), "--device", device, *options)


@pytest.mark.parametrize("given", ["curriculum", "ready", "json"])
def test_a_run_with_a_curriculum_resumes_bit_by_bit(given, train, command, source, tmp_path):
    text = json.dumps({"config": LINES}) if given == "json" else f"{source}:{given}"
    code, _, errors = train("--schedules", text, "--out", "whole")
    assert (code, errors) == (0, [])
    rows = table(tmp_path / "whole")
    clips = [float(row["curriculum_clip_tagger"]) for row in rows]
    assert clips == pytest.approx([max(0.3 - 0.4 * k / ITERATIONS, 0.1) for k in range(ITERATIONS)])
    cut_run(tmp_path / "whole", tmp_path / "cut", 3)
    resume_elsewhere(command, tmp_path / "cut")
    resumed = table(tmp_path / "cut")
    names = ["weights", *(name for name in rows[0] if name.startswith("curriculum_"))]
    assert len(names) >= 5 and len(rows) == len(resumed) == ITERATIONS
    assert [[row[name] for name in names] for row in rows] == [[row[name] for name in names] for row in resumed]


def test_a_curriculum_that_has_moved_is_named_again(train, command, source, tmp_path):
    assert train("--schedules", f"{source}:ready", "--out", "run")[0] == 0
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / source).rename(tmp_path / "elsewhere" / source)
    sys.modules.pop(source.removesuffix(".py"))
    go_on = ["train", "--resume", tmp_path / "run", "--total-steps", "576"]
    code, _, errors = command(*go_on)
    assert code == 2 and re.search(rf"schedules is '.*{source}:ready': there is no file", " ".join(errors))
    code, _, errors = command(*go_on, "--schedules", f"elsewhere/{source}:other")
    assert code == 2 and re.search("its curriculum.* this trainer's", " ".join(errors))
    assert command(*go_on, "--schedules", f"elsewhere/{source}:ready")[0] == 0
    assert command("train", "--resume", tmp_path / "run", "--total-steps", "640")[0] == 0  # from where it is now


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x", "schedules is 'x'; expected module:name or file.py:name"),
        ("FILE:number", "gives a int; expected a Curriculum, or a function"),
        ("FILE:fails", "RuntimeError: no idea"),
        ("FILE:gives_none", "gives a NoneType"),
        ("{", "expected JSON like"),
        ('{"config": 3}', "expected JSON like"),
        ('{"levels": {}}', r"schedules has \['levels'\]; expected some of shared, initial_states, randomize, config"),
        ('{"config": {"clip": [[1, 0.1], [0, 0.2]]}}', "x ascending"),
        ('{"config": {"num_steps": [[0, 1]]}}', "config has 'num_steps'"),
    ],
)
def test_what_is_no_curriculum_is_refused_before_anything_is_written(text, message, train, source, tmp_path):
    code, _, errors = train("--schedules", text.replace("FILE", source), "--out", "run")
    assert code == 2 and re.search(message, " ".join(errors)), errors
    assert not (tmp_path / "run").exists()


def test_the_schedules_of_a_games_presets_are_defaults():
    defaults = {
        name: Train.for_arguments(["overcooked", *options])[1].schedules for name, options in OVERCOOKED.items()
    }
    assert {text: curriculum_of(text).description() for text in defaults.values()} == {
        defaults["ppo"]: Curriculum(shared={"shaping_weight": PiecewiseLinear([(0, 1.0), (0.5, 0.0)])}).description()
    }
    assert Train.for_arguments(["tag_gridworld"])[1].schedules is None


def test_schedules_of_a_declaration_are_checked_like_given_ones():
    with pytest.raises(ConfigError, match=re.escape("schedules has ['weights']; expected some of shared")):
        Curriculum.of_points({"weights": {}})
    with pytest.raises(ConfigError, match="expected pairs"):
        Curriculum.of_points({"shared": {"x": [1, 2]}})
