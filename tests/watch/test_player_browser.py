"""The page that plays films, in a real browser: headless Chromium, driven by Playwright."""

import base64
import io
import math
import os

import numpy as np
import pytest
from PIL import Image, ImageSequence
from support.browser import ARGUMENTS, CHROMIUM, PHONE, require_browser, sync_api
from support.films import chase, film, played

from gpu_vecenv.declare.drawing import BLACK, BLUE, GOLD, GREEN, RED, Circle, Drawing, Line, Polygon, discs
from gpu_vecenv.watch.player import SUBPIXELS, page

require_browser(os.environ.get("GPU_VECENV_REQUIRED", "").split())


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)


@pytest.fixture(scope="module")
def window(browser):
    """Browser contexts by their options, shared between tests: creating one takes as long as a test."""
    made = {}

    def of_kind(**kind):
        if repr(kind) not in made:
            made[repr(kind)] = browser.new_context(**kind)
        return made[repr(kind)]

    return of_kind


@pytest.fixture
def show(window, tmp_path):
    """Opens films in a window, paused. A page must not make requests or log errors."""
    logged, requested, opened, files = [], [], [], []

    def open_films(*films, title="films", reduced_motion="reduce", **kind):
        files.append(tmp_path / f"page{len(files)}.html")
        files[-1].write_text(page(films, title), encoding="utf-8")
        tab = window(reduced_motion=reduced_motion, **kind).new_page()
        opened.append(tab)
        tab.on("console", lambda message: logged.append(message.text))
        tab.on("pageerror", lambda error: logged.append(str(error)))
        tab.on("request", lambda request: requested.append(request.url))
        tab.goto(files[-1].as_uri())
        wait(tab, "window.player")
        return tab

    yield open_films
    for tab in opened:
        tab.close()
    assert logged == [] and [url for url in requested if not url.startswith("data:")] == [
        file.as_uri() for file in files
    ]


@pytest.fixture(scope="module")
def hunt():
    return chase(60, 2, 8, title="hunt")


def wait(tab, condition):
    tab.wait_for_function(f"() => {condition}")  # a function: the page's policy forbids evaluating strings


def player(tab, expression):
    return tab.evaluate(f"window.player.{expression}")


def text(tab, selector):
    return tab.locator(selector).inner_text()


def check_drawn(drawing, shapes):
    """The shapes in the page equal the drawing, within half a subpixel."""
    near = 0.5 / SUBPIXELS / drawing.scale * (1 + 1e-6)  # 1e-6: the arithmetic of both sides
    assert len(shapes) == len(drawing.shapes)
    for shape, seen in zip(drawing.shapes, shapes, strict=True):
        assert seen["kind"] == type(shape).__name__.lower() and tuple(seen["colour"]) == shape.colour
        if isinstance(shape, Circle):
            assert seen["agent"] == shape.agent
            assert seen["x"] == pytest.approx(shape.x, abs=near) and seen["y"] == pytest.approx(shape.y, abs=near)
            assert seen["radius"] == pytest.approx(shape.radius, abs=near)
        else:
            assert np.abs(np.subtract(seen["points"], shape.points)).max() <= near
        if isinstance(shape, Line):
            assert seen["width"] == pytest.approx(shape.width, abs=near)


def colour(tab, x, y, canvas=0):
    """The colour of the canvas at fractions of its width and height."""
    return tuple(
        tab.evaluate(
            """([x, y, canvas]) => {
                const found = document.querySelectorAll("canvas")[canvas];
                const pixel = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
                pixel.drawImage(found, -Math.floor(x * found.width), -Math.floor(y * found.height));
                return [...pixel.getImageData(0, 0, 1, 1).data].slice(0, 3);
            }""",
            [x, y, canvas],
        )
    )


# ---------------------------------------------------------------------- drawing


def test_drawn_positions_are_those_of_the_simulation(show, device):
    given = played("tag_continuous", device, 40, num_taggers=2, num_runners=6, tagging_distance=0.1, max_steps=40)
    tab = show(given)
    assert player(tab, "numSteps") == len(given.drawings) - 1
    for step in range(len(given.drawings)):
        player(tab, f"seek({step})")
        check_drawn(given.drawings[step], player(tab, "shapes(0)"))
    bodies = {shape["agent"] for shape in player(tab, "shapes(0)") if shape.get("agent") is not None}
    assert bodies == set(range(8)), "discs of tag belong to its agents"
    leaving = [event["step"] for event in player(tab, "events")]
    assert leaving == sorted({step + 1 for step in np.flatnonzero((given.active[:-1] & ~given.active[1:]).any(1))})


def test_pictures_on_the_canvas_are_the_drawings(show):
    shapes = [
        Polygon([(0, 0), (50, 0), (50, 50), (0, 50)], GREEN),
        Line([(60, 10), (90, 10), (90, 40)], 6, BLACK),
        Circle(75, 75, 10, RED),
        Circle(25, 75, 10, BLUE, 0),
    ]
    later = Drawing((0, 100, 0, 200), shapes, 400, 300, (1, 2, 3))
    tab = show(film([Drawing((0, 100, 0, 100), shapes, 300, 300, (250, 240, 230)), later]))
    seen = {(0.25, 0.75): GREEN, (0.75, 0.9): BLACK, (0.9, 0.65): BLACK, (0.75, 0.25): RED, (0.25, 0.25): BLUE}
    assert {at: colour(tab, *at) for at in seen} == seen
    assert colour(tab, 0.5, 0.25) == colour(tab, 0.99, 0.01) == (250, 240, 230)
    player(
        tab, "seek(1)"
    )  # 400 x 300 pixels in a square: 75 of 100 are seen in height, of which the drawing is 37.5 wide
    assert colour(tab, 0.5 - 0.25 * 0.375, 0.5 + 0.75 * (0.5 - 75 / 200)) == BLUE
    assert colour(tab, 0.02, 0.5) == (1, 2, 3)
    check_drawn(later, player(tab, "shapes(0)"))


def test_the_canvas_has_the_pixels_of_the_screen(show, hunt):
    tab = show(hunt, **PHONE)
    box = tab.locator("canvas").bounding_box()
    size = tab.evaluate("[document.querySelector('canvas').width, document.querySelector('canvas').height]")
    assert size == [round(3 * box["width"]), round(3 * box["height"])] and box["width"] == box["height"] > 280


# ---------------------------------------------------------------------- playing


def test_it_plays_and_stops_at_the_end(show, hunt):
    tab = show(hunt, reduced_motion="no-preference")  # plays by itself
    wait(tab, "window.player.step > 2")
    tab.locator("#play").click()
    step = player(tab, "step")
    assert player(tab, "playing") is False and tab.locator("#play").get_attribute("aria-label") == "Play"
    tab.locator("#speed").select_option("8")
    tab.locator("#play").click()
    assert tab.locator("#play").get_attribute("aria-label") == "Pause"
    wait(tab, "!window.player.playing")
    assert player(tab, "step") == 60 > step and text(tab, "#clock").split() == ["step", "60", "/", "60"]
    tab.locator("#play").click()  # from the start again
    wait(tab, "window.player.step > 0 && window.player.step < 60")


def test_a_link_names_a_step(show, hunt):
    tab = show(hunt)
    player(tab, "seek(21)")
    assert tab.url.endswith("#t=21")
    tab.evaluate("location.hash = 't=7'")
    wait(tab, "window.player.step === 7")


def test_the_full_window_has_the_picture_and_the_bar_alone(show, hunt):
    tab = show(hunt)
    tab.keyboard.press("v")
    picture, bar = (tab.locator(name).bounding_box() for name in ("canvas", "#playback"))
    assert picture["height"] > 600 and picture["y"] + picture["height"] <= bar["y"] + 1
    assert bar["y"] + bar["height"] == 720 and not tab.locator("h1").is_visible()
    tab.keyboard.press("Escape")
    assert tab.locator("h1").is_visible()


def saved_film(tab, label, name):
    """The bytes of a film that is saved by the keyboard."""
    tab.focus("#save")
    tab.keyboard.press("Enter")
    tab.locator("#formats button").first.wait_for()
    if label not in tab.locator("#formats button").all_inner_texts():
        pytest.skip(f"this Chromium encodes no {label}")
    with tab.expect_download() as saved:
        tab.locator("#formats button", has_text=label).press("Enter")
    assert saved.value.suggested_filename == name
    return saved.value.path().read_bytes()


@pytest.mark.parametrize("kind, label", [("webm", "WebM"), ("mp4", "MP4")])
def test_a_film_is_saved_with_all_steps_and_motion_between_them(show, browser, kind, label):
    drawings = [Drawing((0, 100, 0, 100), [Circle(10 + 20 * step, 50, 9, BLUE, 0)], 300, 300) for step in range(3)]
    tab = show(film(drawings, {"walker": 1}, fps=2))
    content = base64.b64encode(saved_film(tab, label, f"films.{kind}")).decode()
    other = browser.new_page()
    seen = other.evaluate(
        """async ([kind, content]) => {
            const video = document.createElement("video");
            const loaded = new Promise((resolve, reject) => {
                Object.assign(video, { onloadeddata: resolve, onerror: reject });
            });
            video.src = `data:video/${kind};base64,${content}`;
            await loaded;
            const canvas = new OffscreenCanvas(video.videoWidth, video.videoHeight);
            const context = canvas.getContext("2d", { willReadFrequently: true });
            const places = [];
            for (const time of [0.26, 0.51, 1.01, 0.01]) {
                // The frame of the place sought may come after the event "seeked".
                const frame = new Promise((resolve) => {
                    const shown = (_, { mediaTime }) =>
                        mediaTime <= time && mediaTime > time - 1 / 30 ? resolve() : wait();
                    const wait = () => video.requestVideoFrameCallback(shown);
                    wait();
                });
                video.currentTime = time;
                await frame;
                context.drawImage(video, 0, 0);
                const { data, width } = context.getImageData(0, canvas.height / 2, canvas.width, 1);
                const blue = [...Array(width).keys()].filter((k) => data[4 * k] < 90);
                places.push((100 * (blue[0] + blue.at(-1))) / 2 / width);
            }
            return { duration: video.duration, size: [canvas.width, canvas.height], places };
        }""",
        [kind, content],
    )
    other.close()
    assert seen["duration"] == pytest.approx(31 / 30, abs=0.002) and seen["size"] == [960, 960]
    # A frame is a thirtieth of a second, in which the disc moves by 1.3.
    assert seen["places"] == pytest.approx([20, 30, 50, 10], abs=1.4)
    assert player(tab, "step") == 0


def test_without_an_encoder_of_the_browser_a_film_is_a_gif(show):
    drawings = [Drawing((0, 100, 0, 100), [Circle(10 + 20 * step, 50, 9, BLUE, 0)], 300, 300) for step in range(3)]
    tab = show(film(drawings, {"walker": 1}, fps=2))
    tab.evaluate("delete globalThis.VideoEncoder")
    tab.click("#save")
    assert tab.locator("#formats button").all_inner_texts() == ["GIF"]
    tab.keyboard.press("Escape")
    assert tab.locator("#formats").is_hidden() and tab.evaluate("document.activeElement.id") == "save"
    image = Image.open(io.BytesIO(saved_film(tab, "GIF", "films.gif")))
    places, times = [], []
    for frame in ImageSequence.Iterator(image):
        blue = np.flatnonzero(np.asarray(frame.convert("RGB"))[240, :, 0] < 90)
        places.append(100 * (blue[0] + blue[-1]) / 2 / 480)
        times.append(frame.info["duration"])
    # Twenty pictures a second, from the first step to the last one; an edge is half a pixel off at most.
    assert image.size == (480, 480) and times == [50] * 21
    assert places == pytest.approx([10 + 2 * k for k in range(21)], abs=0.3)
    assert player(tab, "step") == 0


def test_loop_repeats_the_film(show):
    tab = show(chase(4, 1, 2))
    tab.locator("#loop").click()
    tab.evaluate("window.seen = new Set(); window.turns = 0; window.player.play()")
    tab.wait_for_function(
        """() => {
            const step = window.player.step;
            if (step < window.last) window.turns += 1;
            window.last = step;
            return window.turns > 1;
        }"""
    )
    assert player(tab, "playing") and tab.locator("#loop").get_attribute("aria-pressed") == "true"


def test_play_after_pause_runs_one_animation_loop(show, hunt):
    tab = show(hunt)
    asked = tab.evaluate(
        """async () => {
            const original = window.requestAnimationFrame.bind(window);
            let asked = 0;
            window.requestAnimationFrame = (act) => {
                asked += 1;
                return original(act);
            };
            for (let i = 0; i < 5; i++) {
                window.player.play();
                window.player.pause();
            }
            window.player.play();
            for (let i = 0; i < 12; i++) await new Promise(original);
            return asked;
        }"""
    )
    assert 10 <= asked <= 6 + 12, "six to begin, then one per frame"


def test_with_reduced_motion_the_page_starts_paused(show, hunt):
    tab = show(hunt)
    assert player(tab, "playing") is False and player(tab, "step") == 0


def test_the_timeline_seeks(show, hunt):
    tab = show(hunt)
    scrub = tab.locator("#scrub")
    box = scrub.bounding_box()
    middle = box["y"] + box["height"] / 2
    tab.mouse.move(box["x"] + box["width"] / 2, middle)
    tab.mouse.down()
    assert player(tab, "step") == 30
    tab.mouse.move(box["x"] + box["width"], middle)
    tab.mouse.up()
    assert player(tab, "step") == 60
    check_drawn(hunt.drawings[60], player(tab, "shapes(0)"))
    scrub.fill("17")
    assert player(tab, "step") == 17 and scrub.get_attribute("aria-valuetext") == "step 17 of 60"
    player(tab, "seek(-5)")
    assert player(tab, "step") == 0
    player(tab, "seek(1e9)")
    assert player(tab, "step") == 60


def test_a_click_on_a_plot_goes_to_its_step(show, hunt):
    tab = show(hunt)
    axis = tab.locator(".plot .axis").first
    box = tab.locator(".plot svg").first.bounding_box()
    left = float(axis.get_attribute("x1"))
    right = float(axis.get_attribute("x2"))
    tab.mouse.click(box["x"] + left + (right - left) / 3, box["y"] + 40)
    assert player(tab, "step") == 20


def test_keys(show, hunt):
    tab = show(hunt)

    def press(keys, expression):
        for key in keys.split():
            tab.keyboard.press(key)
        return player(tab, expression)

    assert press("ArrowRight ArrowRight ArrowRight ArrowLeft", "step") == 2
    assert press("Shift+ArrowRight", "step") == 12
    assert press("End", "step") == 60
    assert press("Home", "step") == 0
    events = sorted({event["step"] for event in player(tab, "events")})
    assert press("e e", "step") == events[1]
    assert text(tab, "#status").startswith(f"Step {events[1]}: runner_"), "screen readers say what happened"
    assert press("Shift+E", "step") == events[0]
    assert press("+ +", "speed") == 4 and press("-", "speed") == 2 and tab.locator("#speed").input_value() == "2"
    assert press("l", "loop") is True and press("l", "loop") is False
    assert press("t", "trails") is True
    assert press("f", "followed") == "tagger_0" and press("f", "followed") == "tagger_1"
    assert press("Shift+F", "followed") == "tagger_0"
    assert press("Escape", "followed") is None and player(tab, "zoom") == 1
    assert press("z z", "zoom") == pytest.approx(2) and press("Shift+Z", "zoom") == pytest.approx(math.sqrt(2))
    assert press("Space", "playing") is True and press("Space", "playing") is False
    tab.keyboard.press("?")
    assert tab.locator("#keys").is_visible() and "play or pause" in text(tab, "#keys")
    step = player(tab, "step")
    assert press("ArrowRight", "step") == step, "the open dialog takes the keys"
    tab.keyboard.press("Escape")
    assert not tab.locator("#keys").is_visible()
    tab.locator("#speed").focus()
    assert press("ArrowRight", "step") == step, "a list keeps its keys"
    tab.locator("#play").focus()
    assert press("Space", "playing") is True, "pressed once, not twice"


# ---------------------------------------------------------------------- agents, events, plots


def test_a_followed_agent_is_centred(show):
    def circles(step):  # three agents on parallel lines
        places = [(10 + step, 20), (90 - 2 * step, 50), (50, 80 + step)]
        return [Circle(*places[i], 3, (RED, BLUE, GREEN)[i], i) for i in range(3)]

    active, rewards = np.ones((11, 3), bool), np.arange(30, dtype=np.float32).reshape(10, 3)
    active[4:, 1] = False
    drawings = [Drawing((0, 100, 0, 100), circles(step)) for step in range(11)]
    drawings[10] = Drawing((0, 100, 0, 100), circles(9)[:1])  # where others were last
    tab = show(film(drawings, {"left": 1, "right": 2}, active=active, rewards=rewards))
    box = tab.locator("canvas").bounding_box()
    tab.mouse.click(box["x"] + 0.9 * box["width"], box["y"] + 0.5 * box["height"])
    assert player(tab, "followed") == "right_0" and player(tab, "zoom") == 4
    assert tab.locator("#follow").input_value() == "right_0"
    for step in range(10):
        player(tab, f"seek({step})")
        assert colour(tab, 0.5, 0.5) == BLUE and colour(tab, 0.5, 0.7) == (255, 255, 255)
        assert ("not active" in text(tab, ".badge")) == (step >= 4)
    assert text(tab, ".badge") == f"right_0 · return so far {written(rewards[:9, 1].sum())} · not active"
    assert text(tab, ".legend >> nth=0").split()[-2:] == ["right_0", written(rewards[:9, 1].sum())]
    player(tab, "seek(10)")
    assert colour(tab, 0.5, 0.5) == (255, 255, 255)
    tab.locator("#follow").select_option("left_0")
    assert colour(tab, 0.5, 0.5) == RED and player(tab, "zoom") == 4
    tab.locator("#follow").select_option("")
    assert player(tab, "followed") is None and player(tab, "zoom") == 1 and tab.locator(".badge").is_hidden()


def written(value):
    return f"{value:.4g}".replace("-", "\N{MINUS SIGN}")


def test_trails_show_past_positions(show):
    drawings = [Drawing((0, 100, 0, 100), [Circle(5 + 3 * step, 50, 2, RED, 0)]) for step in range(31)]
    drawings[30] = Drawing((0, 100, 0, 100), [Circle(50, 95, 2, RED, 0)])  # a jump has no trail
    tab = show(film(drawings, {"walker": 1}))
    player(tab, "seek(29)")
    assert colour(tab, 0.8, 0.5) == colour(tab, 0.2, 0.5) == (255, 255, 255)
    tab.locator("#trails").click()
    near, far = colour(tab, 0.8, 0.5), colour(tab, 0.2, 0.5)
    assert RED[1] < near[1] < far[1] < 255 and near[0] > 200, "red, and fading"
    player(tab, "seek(30)")
    assert colour(tab, 0.71, 0.275) == (255, 255, 255), "half way"


def test_events_are_listed_and_marked_and_go_to_their_steps(show):
    active = np.ones((11, 4), bool)
    active[4:, 1] = active[6:, 2] = active[6:, 3] = False
    active[8:, 3] = True
    active[10] = False
    flags = {"active": active, "terminations": np.zeros((10, 4), bool), "truncations": np.zeros((10, 4), bool)}
    flags["terminations"][3, 1] = flags["terminations"][9, 0] = flags["truncations"][9, 3] = True
    flags["rewards"] = np.full((10, 4), [0.5, -1, 0, 0], np.float32)
    flags["rewards"][3, :2] = 10, 20
    drawings = [Drawing((0, 9, 0, 9), discs(np.ones((4, 2)), 1, RED, range(4)))] * 11
    tab = show(film(drawings, {"cat": 1, "mouse": 3}, **flags))
    assert [(event["step"], event["text"]) for event in player(tab, "events")] == [
        (4, "mouse_0 left; cat_0 +10"),
        (6, "mouse_1 and mouse_2 left"),
        (8, "mouse_2 returned"),
        (10, "the episode ended: 1 terminated, 1 truncated (2 agents)"),
    ]
    rows = tab.locator("#events-list button")
    assert [rows.nth(i).get_attribute("aria-label") for i in (0, 1)] == [
        "mouse_0 left; cat_0 +10 at step 4",
        "mouse_1 and mouse_2 left at step 6",
    ]
    rows.nth(2).click()
    assert player(tab, "step") == 8 and rows.nth(2).get_attribute("aria-current") == "true"
    marks = tab.evaluate(
        """() => {
            const { left, width } = document.getElementById("marks").getBoundingClientRect();
            const place = (mark) => mark.getBoundingClientRect().left + 1 - left; // its middle: it is 2 pixels wide
            return [...document.querySelectorAll("#marks i")].map((mark) => place(mark) / width);
        }"""
    )
    assert marks == pytest.approx([0.4, 0.6, 0.8, 1.0], abs=0.01)  # 0.01: whole pixels


def test_a_long_list_of_events_is_cut(show):
    active = np.arange(602)[:, None] % 2 == np.arange(2)
    drawings = [Drawing((0, 9, 0, 9), [])] * 602
    tab = show(film(drawings, {"agent": 2}, active=active))
    assert tab.locator("#events-list li").count() == 200
    assert len(player(tab, "events")) == 1202 and "1,002 more" in text(tab, "#events-more")


def test_plots_show_rewards_and_active_agents_at_the_step(show, hunt):
    tab = show(hunt)
    player(tab, "seek(33)")
    sums = [hunt.rewards[:33, who].sum(0).mean() for who in (slice(0, 2), slice(2, 10))]
    counts = [hunt.active[33, :2].sum(), hunt.active[33, 2:].sum()]
    legends = [text(tab, f".legend >> nth={i}").split() for i in (0, 1)]
    assert legends[0] == ["tagger", written(sums[0]), "runner", written(sums[1])]
    assert legends[1] == ["tagger", str(counts[0]), "runner", str(counts[1])] and counts[1] < 8
    captions = tab.locator(".plot figcaption").all_inner_texts()
    assert captions == [
        "Return mean of each role's agents, from step 0 on",
        "Active agents per role",
    ]


def test_nan_rewards_leave_gaps(show):
    rewards = np.array([[1], [np.nan], [1]], np.float32)
    tab = show(film([Drawing((0, 1, 0, 1), [])] * 4, rewards=rewards))
    player(tab, "seek(3)")
    assert text(tab, ".legend").split() == ["agent", "\N{EN DASH}"]
    assert "NaN" not in tab.locator(".plot .curve").get_attribute("d")


# ---------------------------------------------------------------------- several films, one agent, layout


def test_films_play_synchronously(show, hunt):
    short = chase(20, 1, 3, seed=4, title="short", facts={"seed": "8"})
    tab = show(hunt, short, title="two")
    assert player(tab, "numSteps") == 60 and tab.locator(".film canvas").count() == 2
    left, right = (tab.locator(".film").nth(i).bounding_box() for i in (0, 1))
    assert left["y"] == right["y"] and left["x"] + left["width"] <= right["x"]
    for step in (7, 50):
        player(tab, f"seek({step})")
        check_drawn(hunt.drawings[step], player(tab, "shapes(0)"))
        check_drawn(short.drawings[min(step, 20)], player(tab, "shapes(1)"))
    assert text(tab, ".film >> nth=1").startswith("short\nended at step 20") and "ended" not in text(
        tab, ".film >> nth=0"
    )
    tab.locator("#follow").select_option("runner_7")  # only the first film has it
    assert tab.locator(".badge >> visible=true").count() == 1
    assert {event["film"] for event in player(tab, "events")} == {0, 1}
    tab.locator("#about summary").click()
    assert text(tab, "#facts").split() == ["hunt", "short", "seed", "7", "8"]


def test_a_game_of_one_agent_has_no_controls_for_agents(show):
    tab = show(played("cartpole", "cpu", 30, title="CartPole"))
    hidden = ["#follow", "#trails", ".badge"]
    assert [tab.locator(name).is_visible() for name in hidden] == [False] * 3
    assert tab.locator(".plot").count() == 1 and text(tab, ".plot figcaption") == "Return from step 0 on"
    for key in "ft":
        tab.keyboard.press(key)
    assert player(tab, "followed") is None and player(tab, "trails") is False
    assert [event["text"] for event in player(tab, "events")] == ["the episode ended: terminated"]


def test_control_and_wheel_zoom_at_the_pointer(show, hunt):
    tab = show(hunt)
    box = tab.locator("canvas").bounding_box()
    before = colour(tab, 0.25, 0.25)
    tab.mouse.move(box["x"] + box["width"] / 4, box["y"] + box["height"] / 4)
    tab.mouse.wheel(0, -100)
    assert player(tab, "zoom") == 1, "the wheel alone scrolls"
    tab.keyboard.down("Control")
    tab.mouse.wheel(0, -200)
    tab.keyboard.up("Control")
    wait(tab, "window.player.zoom > 1")
    assert colour(tab, 0.25, 0.25) == before
    tab.locator("#zoom-out").click(click_count=4)
    assert player(tab, "zoom") == 1 and tab.locator("#zoom-out").is_disabled()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_and_the_picture_follow_the_colour_scheme(show, scheme):
    drawings = [Drawing((0, 9, 0, 9), [Circle(1, 1, 1, GOLD, 0), Circle(5, 5, 1, BLACK, 1)])] * 2
    tab = show(film(drawings, {"bright": 1, "dim": 1}), color_scheme=scheme)
    colours = tab.evaluate(
        "['backgroundColor', 'color'].map((name) => getComputedStyle(document.body)[name].match(/\\d+/g).map(Number))"
    )
    back, text_ = (sum(parts) for parts in colours)
    assert (back > 600 and text_ < 200) if scheme == "light" else (back < 100 and text_ > 600)
    for picture in (scheme, "light" if scheme == "dark" else "dark"):
        assert colour(tab, 0.005, 0.5) == ((255, 255, 255) if picture == "light" else (24, 24, 24))
        assert colour(tab, 1 / 9, 8 / 9) == GOLD, "colours stay"
        assert colour(tab, 5 / 9, 4 / 9) == (BLACK if picture == "light" else (215, 215, 215)), "greys do not"
        tab.locator("#dark").click()
    # Curves stand out from the panel, 3 : 1 as WCAG 2 asks of graphics.
    panel = (255, 255, 255) if scheme == "light" else (25, 30, 38)
    for stroke in tab.evaluate("[...document.querySelectorAll('.curve')].map((curve) => curve.getAttribute('stroke'))"):
        bright, dim = sorted((luminance(panel), luminance([int(part) for part in stroke[4:-1].split()])), reverse=True)
        assert (bright + 0.05) / (dim + 0.05) >= 3


def luminance(colour):
    """Relative luminance, of WCAG 2: https://www.w3.org/TR/WCAG22/#dfn-relative-luminance"""
    shares = [part / 255 for part in colour]
    linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))


@pytest.mark.parametrize("width", [320, 360, 768])
def test_nothing_is_wider_than_a_phone(show, hunt, width):
    others = [chase(5, 1, 1, facts={"digest": f"{i}" * 40}, title="title" * i) for i in range(5)]
    tab = show(hunt, *others, title="word" * 40, viewport={"width": width, "height": 740})
    tab.locator("#about summary").click()
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    bar = tab.locator("#playback").bounding_box()
    assert bar["y"] + bar["height"] <= 740 and bar["height"] < 130, "the bar is in the window, in two rows at most"
    for name in ("#play", "#back", "#forward", "#loop", "#speed", "#trails", "#follow"):
        box = tab.locator(name).bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= width and box["height"] >= 36


def test_every_control_has_a_name_and_a_focus_ring(show, hunt):
    tab = show(hunt)
    nameless = tab.evaluate(
        """[...document.querySelectorAll("button, select, input, canvas, svg[role]")].filter((one) =>
            !(one.getAttribute("aria-label") || one.textContent.trim() || one.getAttribute("title"))).length"""
    )
    assert nameless == 0 and tab.evaluate("document.documentElement.lang") == "en"
    for _ in range(4):
        tab.keyboard.press("Tab")
        ring = "getComputedStyle(document.activeElement)"
        assert tab.evaluate(f"[{ring}.outlineStyle, {ring}.outlineWidth]") == ["solid", "2px"]


HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"


def test_hostile_strings_are_shown_and_not_executed(show):
    drawings = [Drawing((0, 9, 0, 9), [Circle(i, i, 1, RED, i) for i in range(2)])] * 3
    active = np.array([[1, 1], [1, 0], [1, 0]], bool)
    given = film(drawings, {HOSTILE: 2}, [HOSTILE, "__proto__"], title=HOSTILE, facts={HOSTILE: HOSTILE}, active=active)
    tab = show(given, given, title=HOSTILE)
    player(tab, f"follow({HOSTILE!r})")
    player(tab, "seek(2)")
    tab.locator("#about summary").click()
    assert tab.title() == text(tab, "h1") == text(tab, ".film h2 >> nth=0") == HOSTILE
    assert HOSTILE in text(tab, "#facts") and HOSTILE in text(tab, ".badge >> nth=0")
    assert player(tab, "events")[0]["text"] == "__proto__ left"
    assert tab.evaluate("window.hacked") is None and tab.locator("img").count() == 0
    assert tab.locator("script").count() == 2
