"""The page of a game in a real browser, from a file: headless Chromium, driven by Playwright."""

import base64
import dataclasses
import json
import re
import struct

import numpy as np
import pytest
import torch
from support.browser import ARGUMENTS, CHROMIUM, PHONE, require_browser, sync_api
from support.node import REQUIRED, require_node

import gpu_vecenv
from gpu_vecenv.cli.main import main
from gpu_vecenv.engine.digest import Digest
from gpu_vecenv.envs.registry import GAMES
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.train.game_policy import GamePolicy
from gpu_vecenv.train.policy import Policy, default_actor, default_network
from gpu_vecenv.train.role_view import RoleView
from gpu_vecenv.watch.replay import record
from gpu_vecenv.web.page import game_page

require_browser(REQUIRED)
require_node()
GAME = gpu_vecenv.configure("tag_gridworld")


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)


@pytest.fixture
def show(browser, tmp_path):
    """Opens the page of a game, paused. It must make no requests and log no errors."""
    logged, requested, contexts, files = [], [], [], []

    def open_page(game, policy=None, *, replay=None, **kind):
        files.append(tmp_path / f"page{len(files)}.html")
        files[-1].write_bytes(game_page(game, policy, replay=replay)["index.html"])
        contexts.append(browser.new_context(**{"reduced_motion": "reduce", **kind}))
        tab = contexts[-1].new_page()
        tab.on("console", lambda message: logged.append(message.text))
        tab.on("pageerror", lambda error: logged.append(str(error)))
        tab.on("request", lambda request: requested.append(request.url))
        tab.goto(files[-1].as_uri())
        tab.wait_for_function("() => window.page && window.page.drawing")
        return tab

    yield open_page
    for context in contexts:
        context.close()
    loaded = {url.partition("#")[0] for url in requested if not url.startswith("data:")}
    assert logged == [] and loaded == {file.as_uri() for file in files}


def seeded(tab, seed):
    tab.fill("#seed", str(seed))
    tab.press("#seed", "Enter")


def steps(tab, count):
    for _ in range(count):
        tab.click("#forward")


def cells(tab):
    return tab.evaluate("[...page.simulation.env.state.cell]")


@pytest.mark.parametrize("name", ["tag_gridworld", "simple_adversary", "pendulum"])
def test_random_play_has_the_digests_of_the_cpu(show, name):
    game = gpu_vecenv.configure(name)
    env = gpu_vecenv.VecEnv(game, 1, "cpu", autoreset_mode="disabled")
    digest = Digest(env.functions, 1)
    digest.add_reset(*env.reset(seed=2**64 - 3))
    digest.add_state(env)
    for _ in range(8):
        actions = env.sample_actions()
        digest.add_step(actions, env.step(actions))
        digest.add_state(env)
    tab = show(game)
    assert tab.inner_text("#title") == name
    seeded(tab, 2**64 - 3)
    steps(tab, 8)
    assert tab.inner_text("#digest") == f"{digest.words.item() % 2**64:016x}"
    assert tab.inner_text("#step") == "8"
    assert tab.evaluate("Math.max(...page.simulation.returns)") == env.data["engine_returns"].max().item()


def test_the_roles_have_their_colours_in_the_picture_beside_their_names(show):
    tab = show(GAME)
    colour_of = "getComputedStyle(document.querySelector('label[for=actor-{}] .key')).backgroundColor"
    found = {role: tab.evaluate(colour_of.format(role)) for role in GAME.roles}
    drawn = {role: tab.evaluate(f"page.episode.roles[{k}].colour.join(', ')") for k, role in enumerate(GAME.roles)}
    assert found == {role: f"rgb({colour})" for role, colour in drawn.items()} and len(set(found.values())) == 2
    assert show(gpu_vecenv.configure("cartpole")).locator(".key").count() == 0


def test_the_picture_has_the_colours_of_draw(show):
    tab = show(GAME)
    tab.click("#forward")
    found = tab.evaluate(
        """() => {
            const { canvas, drawing } = page;
            const [left, right, bottom, top] = drawing.bounds;
            return drawing.shapes.filter(({ agent }) => agent === 4).map(({ x, y, colour }) => {
                const across = ((x - left) / (right - left)) * canvas.width;
                const down = ((top - y) / (top - bottom)) * canvas.height;
                return [[...canvas.getContext("2d").getImageData(across, down, 1, 1).data].slice(0, 3), colour];
            });
        }"""
    )
    assert found and all(pixel == colour for pixel, colour in found)


def test_it_plays_pauses_and_begins_episodes_anew(show):
    tab = show(gpu_vecenv.configure("tag_gridworld", max_steps=3))
    tab.select_option("#speed", "16")
    tab.click("#play")
    tab.wait_for_function("() => page.simulation.episodes.length >= 2")
    tab.click("#play")
    assert not tab.evaluate("page.playing")
    assert tab.evaluate("page.simulation.episodes.every(({ steps }) => steps === 3)")


def test_the_end_of_an_episode_says_why(show):
    tab = show(gpu_vecenv.configure("tag_gridworld", max_steps=2))
    steps(tab, 2)
    assert tab.inner_text("#end") == "the episode was truncated, after 2 steps"
    tab.click("#forward")
    assert not tab.is_visible("#end") and tab.inner_text("#step") == "0"


def test_roles_can_stand_still(show):
    tab = show(GAME)
    tab.select_option("#actor-tagger", "still")
    before = cells(tab)
    steps(tab, 6)
    assert cells(tab)[:8] == before[:8] and cells(tab)[8:] != before[8:]


def one_way(action):
    """A policy of all agents that always takes this action."""
    policy = Policy(GAME, ["tagger", "runner"], default_network(RoleView(GAME, ["tagger", "runner"]), (8,)))
    policy.network.actor.weight.data.zero_()
    policy.network.actor.bias.data[action] = 50.0
    return policy


def test_trained_policies_play_by_default(show):
    tab = show(GAME, GamePolicy(GAME, {"tagger+runner": one_way(1)}))
    assert tab.input_value("#actor-tagger") == tab.input_value("#actor-runner") == "trained"
    before = cells(tab)
    steps(tab, 3)
    assert cells(tab) == [number + 3 * (k % 2 == 0) for k, number in enumerate(before)]


def test_the_inspector_shows_observation_probabilities_and_value(show):
    torch.manual_seed(3)
    roles = ["tagger", "runner"]
    network = default_network(RoleView(GAME, roles), (8,), actor_gain=1.0)
    policy = Policy(GAME, roles, network, normalize_obs=True, normalize_returns=True)
    policy.obs_normalizer.mean.uniform_(0, 1)
    policy.return_normalizer.mean.fill_(2.5)
    policy.return_normalizer.var.fill_(9.0)
    tab = show(GAME, GamePolicy(GAME, {"tagger+runner": policy}))
    steps(tab, 3)
    tab.click("#inspector summary")
    tab.select_option("#inspect", label="runner 0")
    obs = torch.tensor(tab.evaluate("[...page.simulation.observation(4)]"))
    with torch.no_grad():
        logits, value = policy(obs[None])
    rows = tab.locator("#action tr").all_inner_texts()
    shown = [float(row.split()[-2]) / 100 for row in rows[1:]]
    assert [row.split()[:2] for row in rows[1:]] == [["action", str(k)] for k in range(5)]
    assert shown == pytest.approx(logits[0].softmax(-1).tolist(), abs=6e-4)  # rounded to a tenth of a percent
    found = tab.evaluate("page.simulation.outputs(4, { withValue: true }).value")
    assert found == pytest.approx(value.item(), rel=1e-4)  # other order of sums
    assert float(rows[0].split()[1].replace("\N{MINUS SIGN}", "-")) == pytest.approx(found, rel=1e-2)  # rounded
    parts = GAME.layout.observation.parts["runner"]
    names = [row.split("\t")[0] for row in tab.locator("#observed tr").all_inner_texts()]
    assert {name.replace("_", " ") for name in parts.own} <= set(names)
    assert len(names) == len(parts.own) + sum(entities.count for entities in parts.entities)
    tab.select_option("#actor-runner", "random")
    tab.click("#back")
    assert tab.inner_text("#action") == "Its actor: random."


def test_the_inspector_says_why_there_is_no_value_and_what_a_memory_lacks(show):
    view = RoleView(GAME, ["tagger", "runner"])
    actor = default_actor(view, (8,), kind="gru")
    policy = Policy(GAME, view.roles, actor, critic=torch.nn.Linear(30, 1))
    tab = show(GAME, GamePolicy(GAME, {"tagger+runner": policy}))
    tab.click("#inspector summary")
    reason = "none: the critic of tagger+runner is a Linear, which the page does not compute"
    assert tab.inner_text("#action tr:first-child") == f"value\t{reason}"
    tab.click("#tiles")
    tab.wait_for_function("() => page.mosaic.steps > 0")
    tab.click("#play")  # pauses
    tab.focus("canvas.tiles")
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("Enter")
    step = tab.inner_text("#step")
    assert (
        tab.inner_text("#action p")
        == f"Its memory begins at step {step}, from which on this environment is shown alone."
    )
    seeded(tab, 1)
    assert not tab.is_visible("#action p")


def test_keys_steer_an_agent(show):
    tab = show(GAME)
    tab.select_option("#actor-tagger", "still")
    tab.select_option("#steer", label="runner 0")
    tab.click("#play")  # pauses: steering begins the game
    for key, name in (("ArrowRight", "right"), ("w", "up")):
        column, row = cells(tab)[8:]
        tab.evaluate("document.activeElement.blur()")
        tab.keyboard.down(key)
        tab.evaluate("page.step()")
        tab.keyboard.up(key)
        assert cells(tab)[8:] == ([column + 1, row] if name == "right" else [column, row + 1])
    place = cells(tab)[8:]
    tab.evaluate("page.step()")
    assert cells(tab)[8:] == place, "without a key the agent does nothing"
    assert tab.inner_text("#score tr:first-child th") == "you"


def test_a_held_pointer_and_a_finger_steer(show):
    tab = show(GAME, **PHONE)
    tab.select_option("#actor-tagger", "still")
    tab.select_option("#steer", label="runner 0")
    tab.click("#play")
    box = tab.locator("#picture").bounding_box()
    column, row = cells(tab)[8:]
    tab.touchscreen.tap(box["x"] + box["width"] * 0.9, box["y"] + box["height"] * 0.97)
    tab.evaluate("page.step()")
    assert cells(tab)[8:] == [column + 1, row]


def test_a_game_of_turns_waits_for_the_person(show):
    tab = show(gpu_vecenv.configure("connect_four"))
    tab.select_option("#steer", "0")
    tab.click("#play")
    steps(tab, 3)
    assert tab.inner_text("#step") == "0"
    tab.keyboard.press("3")
    steps(tab, 1)
    assert tab.inner_text("#step") == "1"
    board = "[...page.simulation.env.state.board]"
    assert tab.evaluate(board).index(1) == 5 * 7 + 2
    steps(tab, 1)
    box = tab.locator("#picture").bounding_box()
    tab.mouse.click(box["x"] + box["width"] * 0.86, box["y"] + box["height"] * 0.5)
    steps(tab, 1)
    assert tab.evaluate(f"{board}[{5 * 7 + 6}]") == 1 or tab.evaluate(f"{board}[{4 * 7 + 6}]") == 1


def test_left_and_right_are_the_first_and_the_last_choice_where_no_agent_is_drawn(show):
    tab = show(gpu_vecenv.configure("mountain_car"))
    tab.select_option("#steer", "0")
    tab.click("#play")
    for key, action in (("ArrowLeft", 0), ("ArrowRight", 2), (None, 1)):
        if key:
            tab.evaluate("document.activeElement.blur()")
            tab.keyboard.down(key)
        tab.evaluate("page.step()")
        if key:
            tab.keyboard.up(key)
        assert tab.evaluate("page.simulation.env.actions[0]") == action


def test_randomised_parameters_have_sliders(show):
    game = dataclasses.replace(gpu_vecenv.configure("pendulum"), randomize={"mass": (0.5, 2.0)})
    tab = show(game)
    mass = "page.simulation.env.state.mass[0]"
    drawn = tab.evaluate(mass)
    tab.locator("#parameter-mass").fill("2")
    assert tab.evaluate(mass) == 2 != drawn
    tab.click("#restart")
    assert tab.evaluate(mass) == 2, "a reset would draw it anew"


def test_the_timeline_goes_back_and_forth(show):
    tab = show(GAME)
    seeded(tab, 3)
    tab.locator("#play").focus()  # a field keeps its keys
    digests = []
    for _ in range(6):
        digests.append(tab.inner_text("#digest"))
        tab.keyboard.press("ArrowRight")
    digests.append(tab.inner_text("#digest"))
    tab.locator("#scrub").fill("2")
    assert tab.inner_text("#digest") == digests[2] and tab.inner_text("#clock").split() == ["step", "2", "/", "6"]
    tab.keyboard.press("ArrowLeft")
    assert tab.inner_text("#digest") == digests[1]
    for step in (2, 3, 4, 5, 6):
        tab.keyboard.press("ArrowRight")
        assert tab.inner_text("#digest") == digests[step], "the past again, not another one"
    tab.keyboard.press("Home")
    assert tab.inner_text("#digest") == digests[0]
    assert tab.url.endswith("#seed=3&t=0")


def test_a_link_goes_to_a_step_of_a_seed(show):
    tab = show(GAME)
    seeded(tab, 4)
    steps(tab, 5)
    digest = tab.inner_text("#digest")
    assert tab.url.endswith("#seed=4&t=5")
    tab.reload()
    tab.wait_for_function("() => window.page && page.linked && page.simulation.steps === 5")
    assert tab.inner_text("#digest") == digest and tab.input_value("#seed") == "4"


def test_one_plays_on_from_the_past_in_another_way(show):
    tab = show(GAME)
    tab.select_option("#actor-tagger", "still")
    steps(tab, 6)
    tab.locator("#scrub").fill("3")
    tab.select_option("#steer", label="runner 0")
    tab.click("#play")  # pauses: steering begins the game, which may have gone beyond the sixth step by now
    length = tab.evaluate("page.history.length")
    before = tab.evaluate("(page.seek(3), [...page.simulation.env.state.cell])")
    tab.evaluate("page.step()")
    assert tab.evaluate("page.history.length") == length, "without a key the past is shown again"
    tab.evaluate("page.seek(3)")
    tab.keyboard.down("ArrowRight")
    tab.evaluate("page.step()")
    assert cells(tab) == [*before[:8], before[8] + 1, before[9]]
    assert tab.evaluate("page.history.length") == 4, "what came after is forgotten"
    tab.keyboard.press("Escape")
    assert tab.evaluate("page.simulation.steered") is None


def test_a_gamepad_steers(show):
    tab = show(GAME)
    tab.select_option("#actor-tagger", "still")
    tab.select_option("#steer", label="runner 0")
    tab.click("#play")
    tab.evaluate(
        """() => {
            const buttons = Array.from({ length: 16 }, () => ({ pressed: false }));
            window.pad = { axes: [0.1, -0.2], buttons };
            navigator.getGamepads = () => [null, window.pad];
        }"""
    )
    moved = []
    for pad in ("pad.axes = [0.9, 0.1]", "pad.axes = [0.2, 0.1]", "pad.buttons[12].pressed = true"):
        column, row = cells(tab)[8:]
        tab.evaluate(f"{pad}; page.step()")
        moved.append([cells(tab)[8] - column, cells(tab)[9] - row])
    assert moved == [[1, 0], [0, 0], [0, 1]]


def test_motion_between_steps_is_shown_and_not_simulated(show):
    tab = show(GAME)
    seeded(tab, 3)
    steps(tab, 1)
    found = tab.evaluate(
        """() => {
            const discs = ({ shapes }) => shapes.filter(({ agent }) => agent !== null && agent !== undefined);
            const before = discs(page.episode.picture(0));
            const after = discs(page.episode.picture(1));
            page.viewState.share = 0.25;
            return [before, discs(page.drawing), after].map((each) => each.map(({ x, y }) => [x, y]));
        }"""
    )
    before, shown, after = (np.array(each) for each in found)
    assert (before != after).any() and shown == pytest.approx(before + 0.25 * (after - before), abs=1e-12)
    assert tab.inner_text("#step") == "1"


def test_many_environments_at_once(show):
    tab = show(GAME)
    digest = tab.inner_text("#digest")
    tab.click("#tiles")
    tab.wait_for_function("() => page.mosaic.rate > 0")
    assert tab.inner_text("#rate").startswith("1,024 environments, random actions: ")
    env, runners = "page.mosaic.env", 1024 * 2
    lengths = tab.evaluate(f"[...{env}.state.engine_elapsed_steps]")
    assert len(lengths) == 1024 and max(lengths) > 0
    places = tab.evaluate(f"[...{env}.state.cell].filter((_, k) => k % 10 >= 8)")
    assert len(places) == runners and len(set(places)) > 2, "environments have random streams of their own"
    tab.click("#tiles")
    assert tab.inner_text("#digest") == digest and tab.evaluate("page.mosaic") is None


def test_one_of_many_environments_can_be_shown_alone(show):
    tab = show(GAME)
    tab.click("#tiles")
    tab.wait_for_function("() => page.mosaic.steps > 20")
    tab.click("#play")
    tab.select_option("#rate select", "4096")
    tab.evaluate("page.mosaic.frame(0, true)")
    cells_of = "[...page.mosaic.env.state.cell.subarray({0} * 10, {0} * 10 + 10)]"
    columns = tab.evaluate("page.mosaic.grid.columns")
    chosen, expected = columns + 2, tab.evaluate(cells_of.format(columns + 2))
    tab.focus("canvas.tiles")
    for key in ("ArrowRight", "ArrowRight", "ArrowRight", "ArrowDown"):  # the first one shows where the choice is
        tab.keyboard.press(key)
    assert tab.evaluate("page.mosaic.selected") == chosen
    tab.keyboard.press("Enter")
    assert cells(tab) == expected and not tab.is_visible("canvas.tiles")
    assert int(tab.inner_text("#step")) == tab.evaluate("page.left.env.state.engine_elapsed_steps[0]") > 0
    steps(tab, 1)
    tab.evaluate("document.activeElement.blur()")
    tab.keyboard.press("Home")
    assert cells(tab) == expected, "its past begins where it was taken"
    tab.keyboard.press("Escape")
    assert tab.is_visible("canvas.tiles") and tab.evaluate("page.mosaic.count") == 4096
    place, width = chosen + 2, "page.mosaic.canvas.clientWidth / page.mosaic.grid.columns"
    expected = tab.evaluate(cells_of.format(place))
    tile = tab.evaluate(width)
    tab.click("canvas.tiles", position={"x": 4.5 * tile, "y": 1.5 * tile})
    assert cells(tab) == expected
    tab.click("#picture")
    assert tab.is_visible("canvas.tiles")


def test_trained_policies_play_many_environments(show):
    policy = one_way(1)
    tab = show(GAME, GamePolicy(GAME, {"tagger+runner": policy}))
    tab.select_option("#actor-tagger", "still")
    before = tab.evaluate("page.tiles(true), page.pause(), [...page.mosaic.env.state.cell]")
    tab.evaluate("while (page.mosaic.steps < 1) page.mosaic.frame(0, true)")
    after = tab.evaluate("[...page.mosaic.env.state.cell]")
    moved = [new - old for old, new in zip(before, after, strict=True)]
    assert moved == ([0] * 8 + [tab.evaluate("page.mosaic.steps"), 0]) * 1024
    assert tab.inner_text("#rate").startswith("1,024 environments, tagger still, runner trained: ")


WITHOUT_GPU = "WebGL2RenderingContext.prototype.getExtension = () => null"  # whose name says so: then it is not taken
WITHOUT_WEBGL = """
const own = HTMLCanvasElement.prototype.getContext;
HTMLCanvasElement.prototype.getContext = function (kind, ...options) {
    return kind === "webgl2" ? null : own.call(this, kind, ...options);
};
"""


def tile_pixels(tab):
    """The picture of all environments once each is painted, a row (red, green, blue, alpha) for each pixel."""
    found = tab.evaluate(
        """() => {
            const { mosaic } = page;
            while (mosaic.unpainted > 0) mosaic.frame(0, false);
            mosaic.painter.flush();
            const { width, height } = mosaic.canvas;
            const context = Object.assign(document.createElement("canvas"), { width, height }).getContext("2d");
            context.drawImage(mosaic.canvas, 0, 0);
            const { data } = context.getImageData(0, 0, width, height);
            return [...data].map((byte) => byte.toString(16).padStart(2, "0")).join("");
        }"""
    )
    return np.frombuffer(bytes.fromhex(found), np.uint8).reshape(-1, 4).astype(int)


def test_webgl_draws_what_the_canvas_draws(browser, tmp_path):
    path, pictures = tmp_path / "page.html", {}
    path.write_bytes(game_page(gpu_vecenv.configure("cartpole"))["index.html"])
    for name, script in (("WebGLTiles", WITHOUT_GPU), ("CanvasTiles", WITHOUT_WEBGL)):
        with browser.new_context(reduced_motion="reduce", viewport={"width": 520, "height": 400}) as context:
            tab = context.new_page()
            tab.add_init_script(script)
            tab.goto(f"{path.as_uri()}#1024")
            tab.wait_for_function("() => window.page && page.mosaic")
            assert tab.evaluate("page.mosaic.painter.constructor.name") == name
            pictures[name] = tile_pixels(tab)
    one, other = pictures.values()
    assert one.shape == other.shape and (one[:, 3] == other[:, 3]).all(), "tiles and gaps are in the same places"
    assert len(np.unique(one, axis=0)) > 10
    # Edges are smoothed in two ways; wrong places or colours would differ far more.
    assert np.abs(one - other).mean() < 1


def test_the_tiles_are_dark_where_the_picture_is(show):
    tab = show(GAME, color_scheme="dark")
    tab.click("#tiles")
    tab.wait_for_function("() => page.mosaic.steps > 0")
    tab.click("#play")
    tab.focus("canvas.tiles")

    def background():
        colours, counts = np.unique(tile_pixels(tab), axis=0, return_counts=True)
        return colours[counts.argmax(), :3].tolist()

    assert max(background()) < 40
    tab.keyboard.press("b")
    assert background() == [255, 255, 255]
    tab.keyboard.press("Enter")  # one alone; the others wait
    tab.keyboard.press("b")
    tab.keyboard.press("Escape")
    assert max(background()) < 40


def test_a_frame_of_another_page_shows_the_many_environments_alone(show):
    tab = show(GAME, viewport={"width": 480, "height": 560}, reduced_motion="no-preference")
    tab.goto(f"{tab.url}#1024")
    tab.reload()
    tab.wait_for_function("() => page.mosaic && page.mosaic.rate > 0")
    box = tab.locator("#picture").bounding_box()
    assert box["width"] == pytest.approx(box["height"], abs=1) and not tab.is_visible("#playback")
    assert tab.evaluate("document.documentElement.scrollHeight <= innerHeight")


def test_a_replay_gets_a_badge(show, tmp_path):
    (replay,) = record(gpu_vecenv.VecEnv(GAME, 1, "cpu"), {"tagger": None, "runner": None}, seed=9)
    good, bad, other = (tmp_path / f"{name}.replay" for name in ("good", "bad", "other"))
    replay.save(good)
    late = replay.step_digests.copy()
    late[5] ^= 1
    dataclasses.replace(replay, step_digests=late).save(bad)
    dataclasses.replace(replay, config={**replay.config, "grid": 9}).save(other)
    tab = show(GAME)
    for file, said in (
        (good, "good.replay: bit-identical to the recorded run"),
        (bad, "bad.replay: differs from the recorded run from step 5 on"),
        (other, "other.replay cannot be played: its configuration has another grid than this page"),
    ):
        tab.set_input_files("#file", file)
        tab.wait_for_function(f"() => document.getElementById('badge').textContent === {json.dumps(said)}")
    tab.set_input_files("#file", good)
    tab.wait_for_function("() => page.playing && page.simulation.steps > 0")
    assert tab.evaluate("page.replay.header.seed") == "9"


def test_a_page_can_begin_with_a_replay(show):
    (replay,) = record(gpu_vecenv.VecEnv(GAME, 1, "cpu"), {"tagger": None, "runner": None}, seed=9)
    tab = show(GAME, replay=replay)
    tab.wait_for_function("() => !document.getElementById('badge').hidden")
    assert "bit-identical to the recorded run" in tab.inner_text("#badge")


def test_every_control_has_a_name_and_is_reached_by_tab(show):
    tab = show(dataclasses.replace(gpu_vecenv.configure("pendulum"), randomize={"mass": (0.5, 2.0)}))
    controls = "main button, main select, main input, main canvas, main summary, header button, header select"
    nameless, hidden = tab.evaluate(
        """(controls) => {
            const all = [...document.querySelectorAll(controls)];
            const named = (one) => one.getAttribute("aria-label") || one.textContent.trim() || one.labels?.length;
            const skipped = (one) => one.tabIndex < 0;
            return [all.filter((one) => !named(one)), all.filter(skipped)].map((each) => each.map(({ id }) => id));
        }""",
        controls,
    )
    assert nameless == hidden == []
    reached = set()
    for _ in range(30):
        tab.keyboard.press("Tab")
        reached.add(tab.evaluate("document.activeElement.id"))
    assert {"back", "play", "forward", "scrub", "speed", "restart", "picture", "steer", "parameter-mass"} <= reached


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone(show, scheme):
    tab = show(GAME, color_scheme=scheme, **PHONE)
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert tab.locator("#picture").bounding_box()["width"] > 280


def test_the_command_writes_a_folder(tmp_path, capsys):
    folder = tmp_path / "page"
    assert main(["web", "cartpole", "--out", str(folder), "--title", "</script><b>poles"]) in (0, None)
    assert sorted(file.name for file in folder.iterdir()) == ["game.js", "game.json", "game.wasm", "index.html"]
    page, wasm = (folder / "index.html").read_text(), (folder / "game.wasm").read_bytes()
    assert base64.b64encode(wasm).decode() in page and "<b>poles" not in page
    assert json.loads((folder / "game.json").read_text())["game"] == "cartpole"
    first, second = capsys.readouterr().out.splitlines()[-2:]
    assert "index.html: " in first and first.endswith("or send it alone")
    assert second == "game.js, game.json, game.wasm are its parts, for pages of your own"


@pytest.mark.parametrize("name", GAMES)
def test_every_game_has_a_page_of_at_most_300_kb(name):
    assert len(game_page(gpu_vecenv.configure(name))["index.html"]) <= 300_000


def test_a_page_plays_with_the_shared_fields_of_the_run():
    game = gpu_vecenv.configure("overcooked")
    trainer = gpu_vecenv.Trainer(gpu_vecenv.VecEnv(game, 1, "cpu"), gpu_vecenv.PPOConfig(total_steps=10))
    for shared, weight in (({"shaping_weight": torch.tensor(0.25)}, 0.25), ({}, 1.0)):
        files = game_page(game, GamePolicy(game, trainer.policies, shared=shared))
        bits = json.loads(files["game.json"])["shared"]["state_shaping_weight"]
        assert struct.unpack("f", base64.b64decode(bits)) == (weight,)
        assert re.findall(rb'"name": ?"shaping_weight", ?"value": ?([\d.]+)', files["index.html"]) == [
            str(weight).encode()
        ]


def test_policies_of_another_configuration_are_refused():
    other = gpu_vecenv.configure("tag_gridworld", num_taggers=2)
    policy = Policy(other, ["tagger", "runner"], default_network(RoleView(other, ["tagger", "runner"]), (8,)))
    with pytest.raises(ConfigError, match="the policies are of"):
        game_page(GAME, GamePolicy(other, {"tagger+runner": policy}))
    (replay,) = record(gpu_vecenv.VecEnv(other, 1, "cpu"), {"tagger": None, "runner": None})
    with pytest.raises(ConfigError, match="the replay is of tag_gridworld"):
        game_page(GAME, replay=replay)
