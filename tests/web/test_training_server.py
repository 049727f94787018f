"""The page of a run in training: who gets it, what it gets, and that training is the same with and without it."""

import contextlib
import csv
import http.client
import io
import json
import os
import queue
import re
import signal
import threading
import urllib.parse

import pytest
import torch
from support.browser import ARGUMENTS, CHROMIUM, require_browser, sync_api
from support.node import REQUIRED, require_node

import gpu_vecenv
from gpu_vecenv import Curriculum, PiecewiseLinear
from gpu_vecenv.cli.main import main
from gpu_vecenv.train.ppo import PPOConfig
from gpu_vecenv.train.run import run
from gpu_vecenv.train.run_folder import RunConfig
from gpu_vecenv.train.trainer import Trainer
from gpu_vecenv.web.policies import policies_json
from gpu_vecenv.web.training_server import TrainingServer

require_node()
ITERATIONS = 4
MINUS = "\N{MINUS SIGN}"
RUN = RunConfig(episodes=1, best_episodes=0, digests=True)


def new_trainer():
    env = gpu_vecenv.make("tag_gridworld", num_envs=8, device="cpu", autoreset_mode="next_step")
    config = PPOConfig(total_steps=8 * 8 * ITERATIONS, num_steps=8, hidden_sizes=(8,), num_minibatches=1)
    return Trainer(env, config, seed=3)


def get(url, *, host=None):
    """Status and content."""
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc)
    with contextlib.closing(connection):
        connection.request("GET", f"{parts.path}?{parts.query}", headers={"Host": host or parts.netloc})
        response = connection.getresponse()
        return response.status, response.read()


@pytest.fixture
def server(tmp_path):
    with TrainingServer(new_trainer(), tmp_path / "run") as one:
        yield one


def train(server, tmp_path, after_row=None):
    return run(server._trainer, tmp_path / "run", RUN, after_row=after_row or server.update)


def test_only_who_has_the_token_gets_anything(server):
    address = server.url.split("/")[2]
    assert address.startswith("127.0.0.1:")
    assert get(server.url)[0] == 200 and get(server.url, host=address.replace("127.0.0.1", "localhost"))[0] == 200
    for path in ("", "policies", "x/", f"{'A' * 22}/", "%00/", f"../{server.url.split('/')[3]}/"):
        assert get(f"http://{address}/{path}")[0] == 403
    assert get(server.url, host="example.org")[0] == 403, "a name that a foreign page made to mean this computer"
    assert get(f"{server.url}settings.json")[0] == get(f"{server.url}metrics?start=-1")[0] == 404


def test_policies_are_copied_where_a_page_asked_for_newer_ones(server, tmp_path):
    copied = []

    def after_row():
        server.update()
        copied.append(json.loads(get(f"{server.url}policies?after=")[1])["iteration"])

    assert train(server, tmp_path, after_row) == 0
    assert copied[:2] == [0, 2], "at the first row no page had asked"
    assert get(f"{server.url}policies?after={copied[-1]}-training") == (204, b"")
    server.finish()
    status, content = get(f"{server.url}policies?after={ITERATIONS}-training")
    found = json.loads(content)
    assert (status, found["phase"], found["iteration"]) == (200, "ended", ITERATIONS)
    assert found["policies"] == policies_json(server._trainer.policies.values())


def test_a_run_is_bit_identical_with_and_without_a_page(server, tmp_path):
    run(new_trainer(), tmp_path / "alone", RUN)

    def after_row():
        get(f"{server.url}policies?after=")
        get(f"{server.url}metrics?start=0")
        server.update()

    train(server, tmp_path, after_row)
    digests = [
        [row["weights"] for row in csv.DictReader((tmp_path / name / "metrics.csv").open())]
        for name in ("alone", "run")
    ]
    assert digests[0] == digests[1] and len(set(digests[0])) == ITERATIONS


def test_metrics_come_in_whole_lines_from_a_byte_on(server, tmp_path):
    assert get(f"{server.url}metrics?start=0") == (200, b""), "rows of an earlier run in the folder may be removed yet"
    train(server, tmp_path)
    path = tmp_path / "run" / "metrics.csv"
    whole = path.read_bytes()
    assert get(f"{server.url}metrics?start=0") == (200, whole)
    with path.open("ab") as file:
        file.write(b"5,half a row")
    line = whole.rstrip(b"\n").rfind(b"\n") + 1
    assert get(f"{server.url}metrics?start={line}") == (200, whole[line:])
    assert get(f"{server.url}metrics?start={len(whole)}") == (200, b"")


def test_the_page_plays_newer_policies_and_draws_curves(server, tmp_path):
    require_browser(REQUIRED)
    weight = "page.simulation.policies[0].layers[0].weight[0]"
    with sync_api.sync_playwright() as playwright:
        tab = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS).new_page(reduced_motion="reduce")
        logged = []
        tab.on("console", lambda message: logged.append(message.text))
        tab.goto(server.url)
        tab.wait_for_function("() => window.page?.training?.known === '0-training'")
        value = "page.simulation.outputs(0, { withValue: true }).value"
        before, value_before = tab.evaluate(weight), tab.evaluate(value)
        train(server, tmp_path)
        server.finish()
        tab.wait_for_function(f"() => page.training.known === '{ITERATIONS}-ended'")
        after = torch.tensor(tab.evaluate(weight))
        assert after == next(iter(server._trainer.policies.values())).network.trunk[0].weight[0, 0] != before
        assert tab.evaluate(value) != value_before, "newer critics too"
        assert (
            tab.inner_text("#training p")
            == f"Training has ended after {ITERATIONS} iterations; the final policies play"
        )
        path = tmp_path / "run" / "metrics.csv"
        (*_, last), names = csv.reader(path.open()), path.read_text().split("\n")[0].split(",")
        with path.open("a") as file:
            for number, value in ((5, "1.5"), (6, "-2")):
                row = dict(zip(names, last, strict=True)) | {"env_steps": 64 * number, "return_tagger": value}
                print(",".join(map(str, row.values())), file=file)
        tab.wait_for_selector("polyline")
        assert tab.locator("#training figcaption").all_inner_texts()[0].split("\n") == ["return of tagger", f"{MINUS}2"]
        assert (
            tab.locator("#training svg")
            .first.get_attribute("aria-label")
            .endswith(f"between {MINUS}2 and 1.5, now {MINUS}2")
        )
        assert logged == []


def test_the_page_s_next_episode_has_the_numbers_that_a_curriculum_reached(tmp_path):
    require_browser(REQUIRED)
    env = gpu_vecenv.make("overcooked", num_envs=8, device="cpu", autoreset_mode="next_step")
    config = PPOConfig(total_steps=8 * 8 * ITERATIONS, num_steps=8, hidden_sizes=(8,), num_minibatches=1)
    fading = Curriculum(shared={"shaping_weight": PiecewiseLinear([(0, 1.0), (1, 0.0)])})
    weight = "page.simulation.env.state.shaping_weight[0]"
    with (
        TrainingServer(Trainer(env, config, seed=3, curriculum=fading), tmp_path / "run") as one,
        sync_api.sync_playwright() as playwright,
    ):
        tab = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS).new_page(reduced_motion="reduce")
        tab.goto(one.url)
        tab.wait_for_function("() => window.page?.training?.known === '0-training'")
        train(one, tmp_path)
        one.finish()
        tab.wait_for_function(f"() => page.training.known === '{ITERATIONS}-ended'")
        reached = env.state["shaping_weight"].item()
        assert tab.evaluate(weight) == 1.0 != reached, "the episode that the page plays goes on"
        tab.evaluate("page.restart()")
        assert tab.evaluate(weight) == reached == float(tab.input_value("#parameter-shaping_weight"))
        tab.fill("#parameter-shaping_weight", "0.75")
        tab.press("#parameter-shaping_weight", "Enter")
        tab.evaluate("page.restart()")
        assert tab.evaluate(weight) == 0.75, "the reader's choice is kept"


class Lines(io.StringIO):
    """Standard output, whose parts other threads can wait for."""

    def __init__(self):
        super().__init__()
        self.parts = queue.Queue()

    def write(self, text):
        self.parts.put(text)
        return super().write(text)

    def wait_for(self, pattern):
        while not (found := re.search(pattern, self.getvalue())):
            self.parts.get(timeout=300)
        return found


def test_the_command_serves_until_ctrl_c_and_says_how_to_play(tmp_path):
    output, pages = Lines(), []

    def reader():
        pages.append(get(output.wait_for(r"http://\S+/")[0])[0])
        output.wait_for("Ctrl-C ends the server")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=reader)
    thread.start()
    options = "--num-envs 8 --num-steps 8 --total-steps 128 --device cpu --episodes 1 --best-episodes 0 --watch".split()
    with contextlib.redirect_stdout(output):
        assert main(["train", "cartpole", "--out", str(tmp_path / "a run"), *options]) == 0
    thread.join()
    assert pages == [200]
    command = re.search(r"to play it +gpu-vecenv (web cartpole --run '.*a run') --out page", output.getvalue())[1]
    assert main(
        [*command.replace(f"'{tmp_path}/a run'", "").split(), str(tmp_path / "a run"), "--out", str(tmp_path / "page")]
    ) in (0, None)
    assert b'"name":"agent"' in (tmp_path / "page" / "index.html").read_bytes()
