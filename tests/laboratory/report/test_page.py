"""The page in a real browser."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="needs the `experiments` extra")

from blockadapt_experiments.core.experiment import Experiment
from blockadapt_experiments.drawing.colours import COLOURS, STYLES
from blockadapt_experiments.report.reading import read
from blockadapt_experiments.results import formats
from support.browser import Browser

Made = tuple[Path, Experiment[Any]]
T4 = 3.182446305284263  # Student's t at 0.975, 3 degrees of freedom


def click(browser: Browser, selector: str) -> None:
    browser.run(f"document.querySelector({json.dumps(selector)}).click()")


def chosen(browser: Browser) -> str:
    return browser.run("location.hash")


def lines(browser: Browser) -> list[str]:
    return browser.run("[...document.querySelectorAll('.line[data-arm]')].map((line) => line.dataset.arm)")


def ticks(browser: Browser) -> str:
    return browser.run("[...document.querySelectorAll('.panel text')].map((node) => node.textContent).join(' ')")


def box(browser: Browser, selector: str = ".panel svg[tabindex]") -> tuple[float, float, float, float]:
    """Where an element is on the screen, scrolled to first."""
    script = (
        f"(() => {{ const node = document.querySelector({json.dumps(selector)});"
        "node.scrollIntoView({ block: 'center', behavior: 'instant' }); const r = node.getBoundingClientRect();"
        "return [r.x, r.y, r.width, r.height]; })()"
    )
    return tuple(browser.run(script))


def pixel(browser: Browser, x: float) -> float:
    """Where this value of the horizontal axis is on the screen."""
    left, _, width, _ = box(browser)
    inside = f"scales(xDomain(shownCurves()), [1, 2], {{ x: 56, y: 8, width: {width} - 56 - 18, height: 1 }}).toX({x})"
    return left + browser.run(inside)


def test_page_draws_without_complaint_and_asks_for_nothing(made: Made, panels: Path, browser: Browser) -> None:
    for page, curves in ((made[0] / "report.html", 5), (panels, 6)):
        browser.open(page)
        assert browser.problems == []
        assert [request for request in browser.requests if not request.startswith("data:")] == [page.as_uri()]
        assert browser.run("panels.dataset.rendered") == str(curves)
        assert browser.run(
            "[...document.querySelectorAll('.line[data-arm]')].every((line) => line.getTotalLength() > 20)"
        )


def test_page_may_not_ask_for_anything(made: Made, browser: Browser) -> None:
    browser.open(made[0] / "report.html")
    blocked = (
        "new Promise((done) => { addEventListener('securitypolicyviolation', (e) => done(e.effectiveDirective));"
        "document.body.append(Object.assign(new Image(), { src: 'http://127.0.0.1:9/x.png' })); })"
    )
    assert browser.run(blocked) == "img-src"


def test_heading_has_the_scale(made: Made, browser: Browser) -> None:
    browser.open(made[0] / "report.html")
    assert browser.run("document.querySelector('h1').innerText") == "LeNet-300-100 on MNIST laptop scale"
    assert browser.run("document.title") == "LeNet-300-100 on MNIST – laptop scale"
    assert browser.run("[...document.querySelectorAll('.badge')].map((b) => b.innerText)") == [
        "✓ Held",
        "✗ Did not hold",
        "? Cannot tell",
    ]


def test_axes_switch_by_click_and_by_address(made: Made, browser: Browser) -> None:
    page = made[0] / "report.html"
    browser.open(page)
    assert "0.01" in ticks(browser)
    before = browser.run("document.querySelector('.line[data-arm]').getAttribute('d')")
    click(browser, "input[name=y][value=linear]")
    assert chosen(browser) == "#y=linear"
    assert browser.run("document.querySelector('.line[data-arm]').getAttribute('d')") != before
    click(browser, "input[name=x][value=seconds]")
    assert ticks(browser).endswith("seconds")
    shown, state = browser.run("panels.innerHTML"), chosen(browser)
    browser.open(page, state)
    assert browser.run("panels.innerHTML") == shown
    assert browser.run("document.querySelector('input[name=y]:checked').value") == "linear"
    click(browser, "input[name=y][value=log]")
    click(browser, "input[name=x][value=axis]")
    assert browser.run("document.querySelector('.line[data-arm]').getAttribute('d')") == before
    browser.open(page, "#y=cubic&metric=none&x=")  # what it does not know it leaves
    assert browser.run("document.querySelector('.line[data-arm]').getAttribute('d')") == before
    assert browser.problems == []


def test_metric_of_curves_and_table_switch_together(made: Made, browser: Browser) -> None:
    browser.open(made[0] / "report.html", "#metric=accuracy")
    assert browser.run("document.querySelector('#table-metric').value") == "accuracy"
    assert "98.0" in ticks(browser)
    heads = (
        "[...document.querySelectorAll('#results th[scope=col]')].filter((th) => !th.hidden).map((th) => th.innerText)"
    )
    names = ["Optimizer", "lr", "Final", "At equal time", "Best", "Oscillation"]
    assert browser.run(heads) == [*names, "Epochs to target", "Seconds to target", "Seconds", "State MB", "Seeds"]
    browser.run(
        "document.querySelector('#table-metric').value = 'loss';"
        "document.querySelector('#table-metric').dispatchEvent(new Event('change', { bubbles: true }))"
    )
    assert browser.run("document.querySelector('select[name=metric]').value") == "loss"
    assert "98.0" not in ticks(browser)


def test_lines_swatches_and_table_have_the_optimizers_own_colour_and_dash(made: Made, browser: Browser) -> None:
    browser.open(made[0] / "report.html")
    for arm in ("adam", "block-adam", "ggt"):
        red, green, blue = (int(COLOURS[STYLES[arm].colour][i : i + 2], 16) for i in (1, 3, 5))
        for selector in (
            f".panel .line[data-arm={arm}]",
            f"#legend [data-arm={arm}] line",
            f".key[data-arm={arm}] line",
        ):
            style = f"getComputedStyle(document.querySelector('{selector}'))"
            assert browser.run(f"{style}.stroke") == f"rgb({red}, {green}, {blue})", selector
            dashed = browser.run(f"{style}.strokeDasharray") != "none"
            assert dashed == bool(STYLES[arm].strokes()), selector


def test_legend_hides_shows_and_isolates(made: Made, browser: Browser) -> None:
    browser.open(made[0] / "report.html")
    assert lines(browser) == ["adam", "block-adam", "ggt", "rmsprop", "block-rmsprop"]
    click(browser, "#legend [data-arm=ggt]")
    assert lines(browser) == ["adam", "block-adam", "rmsprop", "block-rmsprop"]
    assert browser.run("document.querySelector('#legend [data-arm=ggt]').getAttribute('aria-pressed')") == "false"
    x, y, width, height = box(browser, "#legend [data-arm=adam]")
    for count in (1, 2):
        for kind in ("Pressed", "Released"):
            browser.mouse(kind, x + width / 2, y + height / 2, button="left", clickCount=count)
    assert lines(browser) == ["adam"]
    assert "1 diverged" in browser.run("document.querySelector('#legend [data-arm=ggt]').innerText")


def test_seeds_are_drawn_when_asked_for(made: Made, browser: Browser) -> None:
    page = made[0] / "report.html"
    browser.open(page)
    assert browser.run("document.querySelectorAll('.seed').length") == 0
    click(browser, "input[name=seeds]")
    assert browser.run("document.querySelectorAll('.seed').length") == 20
    assert chosen(browser) == "#seeds=1"


def test_a_diverged_curve_has_no_band(made: Made, browser: Browser) -> None:
    browser.open(made[0] / "report.html")
    assert browser.run("document.querySelectorAll('.band').length") == 4


def test_on_a_log_axis_curves_are_geometric_means_and_bands_have_a_lower_end(made: Made, browser: Browser) -> None:
    browser.open(made[0] / "report.html", "#off=ggt")
    band = read(*made).curve("rmsprop", "loss").band(log=True)
    drawn = browser.run("shownCurves().find((c) => data.arms[c.series.arm].name === 'rmsprop').points")
    for key, values in (("y", band.middle), ("low", band.low), ("high", band.high)):
        assert [point[key] for point in drawn] == pytest.approx(values, rel=1e-4)
    assert "NaN" not in browser.run("document.querySelector('.band').getAttribute('d')")


def test_pointing_reads_the_numbers_of_the_table(made: Made, browser: Browser) -> None:
    out, about = made
    browser.open(out / "report.html", "#metric=accuracy")
    _, y, _, height = box(browser)
    browser.mouse("Moved", pixel(browser, 7.2), y + height / 2)
    head, *values = browser.run("document.querySelector('.tip').innerText").split("\n")
    assert head == "epoch 7"
    curve = read(out, about).curve("adam", "accuracy")
    column = curve.values[:, 6]
    expected = formats.estimate(column.mean(), T4 * column.std(ddof=1) / 2)
    assert expected in values[values.index("Adam") + 1]
    means = [float(value.split(" ±")[0]) for value in values[1::2]]
    assert means == sorted(means, reverse=True)
    browser.mouse("Moved", pixel(browser, 18), y + height / 2)
    assert "(3 of 4 seeds)" in browser.run("document.querySelector('.tip').innerText")
    browser.mouse("Moved", 5, 5)
    assert browser.run("document.querySelector('.tip').hidden")


def test_seconds_are_read_at_each_curves_own_point(made: Made, browser: Browser) -> None:
    browser.open(made[0] / "report.html", "#x=seconds&off=rmsprop,block-rmsprop,ggt")
    _, y, _, height = box(browser)
    browser.mouse("Moved", pixel(browser, 11.1), y + height / 2)  # an epoch takes 1.1 and 1.6 seconds
    text = browser.run("document.querySelector('.tip').innerText")
    assert re.search(r"Adam\n.* at epoch 10\n", text)
    assert re.search(r"Block-Adam\n.* at epoch 7$", text.strip())


def test_equal_steps_and_equal_time_stand_side_by_side(made: Made, browser: Browser) -> None:
    browser.open(made[0] / "report.html")
    click(browser, "input[name=x][value=both]")
    texts = browser.run("[...document.querySelectorAll('.panel')].map((p) => p.querySelector('svg').textContent)")
    assert [re.search("[a-z]+$", text)[0] for text in texts] == ["epoch", "seconds"]  # type: ignore[index]
    assert len(lines(browser)) == 10
    assert chosen(browser) == "#x=both"
    _, y, _, height = box(browser, ".panel:nth-child(2) svg[tabindex]")
    left, _, width, _ = box(browser, ".panel:nth-child(2) svg[tabindex]")
    browser.mouse("Moved", left + 0.4 * width, y + height / 2)
    assert browser.run("document.querySelector('.tip:not([hidden])').innerText").startswith("seconds ")
    browser.run("change({ from: '5', to: '' })")
    assert browser.run("[state.x, state.from]") == ["axis", "5"]
    assert browser.problems == []


def test_keyboard_reads_values(made: Made, browser: Browser) -> None:
    browser.open(made[0] / "report.html")
    browser.run("document.querySelector('.panel svg').focus()")
    heads = []
    for key in ("ArrowRight", "ArrowRight", "End", "ArrowLeft", "Home"):
        browser.key(key)
        heads.append(browser.run("document.querySelector('.tip strong').innerText"))
    assert heads == ["epoch 1", "epoch 2", "epoch 20", "epoch 19", "epoch 1"]
    browser.key("Escape")
    assert browser.run("document.querySelector('.tip').hidden")


def test_dragging_enlarges_and_the_whole_comes_back(made: Made, browser: Browser) -> None:
    browser.open(made[0] / "report.html")
    whole = browser.run("panels.innerHTML")
    _, y, _, height = box(browser)
    start, end = pixel(browser, 10), pixel(browser, 15)
    browser.mouse("Moved", start, y + height / 2)
    browser.mouse("Pressed", start, y + height / 2, button="left", clickCount=1)
    browser.mouse("Moved", end, y + height / 2, button="left")
    browser.mouse("Released", end, y + height / 2, button="left", clickCount=1)
    low, high = browser.run("[Number(state.from), Number(state.to)]")
    assert low == pytest.approx(10, abs=0.05)
    assert high == pytest.approx(15, abs=0.05)
    assert browser.run("document.querySelector('input[name=from]').value") == str(low)
    click(browser, "#whole")
    assert browser.run("panels.innerHTML") == whole


def test_headings_sort_and_a_missing_number_comes_last(made: Made, browser: Browser) -> None:
    browser.open(made[0] / "report.html")
    order = "[...document.querySelectorAll('#results tbody th')].map((th) => th.innerText.trim())"
    names = browser.run("[...document.querySelectorAll('#results thead button')].map((button) => button.innerText)")
    column = names.index("Seconds") + 1
    heading, cell = f"#results thead th:nth-child({column})", f"#results tbody tr:first-child :nth-child({column})"
    ends = []
    for _ in ("up", "down"):
        click(browser, f"{heading} button")
        found = browser.run(order)
        ends.append(
            (found[0], found[-1], browser.run(f"document.querySelector('{heading}').getAttribute('aria-sort')"))
        )
    assert ends == [("Adam", "GGT", "ascending"), ("GGT", "Adam", "descending")]
    browser.run(f"document.querySelector('{cell}').dataset.value = 'nan'")
    for _ in ("up", "down"):
        click(browser, f"{heading} button")
        assert browser.run(order)[-1] == "GGT"
    click(browser, "#results thead th button")
    assert browser.run(order) == ["Adam", "Block-Adam", "Block-RMSprop", "GGT", "RMSprop"]


def test_variants_are_panels_on_one_scale(panels: Path, browser: Browser) -> None:
    browser.open(panels)
    titles = "[...document.querySelectorAll('.panel h3')].map((h) => h.innerText)"
    assert browser.run(titles) == ["M=1 training loss", "M=5 training loss", "M=10 training loss"]
    texts = browser.run("[...document.querySelectorAll('.panel')].map((p) => p.querySelector('svg').textContent)")
    assert len(texts) == 3
    assert len(set(texts)) == 1
    browser.open(panels, "#variant=M%3D5")
    assert browser.run(titles) == ["M=5 training loss"]
    assert browser.run("panels.dataset.rendered") == "2"


def test_long_curves_are_thinned_but_keep_their_ends(panels: Path, browser: Browser) -> None:
    browser.open(panels)
    series = browser.run("data.series.map((s) => [s.x.length, s.x[0], s.x.at(-1), s.seed_x.length])")
    assert series == [[800, 1, 1200, 200]] * 6
    assert "some points are left out" in browser.run("document.querySelector('#curves').innerText")


@pytest.mark.parametrize("width", [320, 768, 1280])
def test_page_fits_the_screen(made: Made, panels: Path, browser: Browser, width: int) -> None:
    for page in (made[0] / "report.html", panels):
        browser.open(page, width=width)
        assert browser.run("document.documentElement.scrollWidth") == width
        svg = browser.run("document.querySelector('.panel svg').viewBox.baseVal.width")
        assert box(browser)[2] == pytest.approx(svg, abs=1)  # text is as large as it should be


def test_a_reading_stays_on_a_narrow_screen(made: Made, browser: Browser) -> None:
    browser.open(made[0] / "report.html", "#metric=accuracy", width=390, height=844)
    _, y, _, height = box(browser)
    for epoch in (2, 10, 19):
        browser.mouse("Moved", pixel(browser, epoch), y + height / 2)
        left, _, width, _ = box(browser, ".tip:not([hidden])")
        assert left >= 0
        assert left + width <= 390


def contrast(first: str, second: str) -> float:
    """As WCAG 2 has it, of two colours like "rgb(1, 2, 3)"."""

    def light(colour: str) -> float:
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((light(first), light(second)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_can_be_read_in_both_schemes(made: Made, browser: Browser, dark: bool) -> None:
    browser.open(made[0] / "report.html", dark=dark)
    paper = browser.run("getComputedStyle(document.body).backgroundColor")
    assert contrast(paper, "rgb(0, 0, 0)") < 2 if dark else contrast(paper, "rgb(255, 255, 255)") < 2
    for selector in (
        "body",
        ".lead",
        ".note",
        "a",
        ".held .badge",
        ".did-not-hold .badge",
        ".cannot-tell .badge",
        ".warn",
    ):
        ink = browser.run(f"getComputedStyle(document.querySelector('{selector}')).color")
        assert contrast(ink, paper) >= 4.5, selector
    for selector in (".notice", "td.best", "td.best .half"):
        style = f"getComputedStyle(document.querySelector('{selector}'))"
        behind = f"getComputedStyle(document.querySelector('{selector.split()[0]}')).backgroundColor"
        assert contrast(browser.run(f"{style}.color"), browser.run(behind)) >= 4.5, selector


def test_every_control_has_a_name(made: Made, panels: Path, browser: Browser) -> None:
    for page in (made[0] / "report.html", panels):
        browser.open(page)
        nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
        roles = ("button", "checkbox", "combobox", "radio", "spinbutton", "link", "image", "region", "navigation")
        found = [node for node in nodes if node.get("role", {}).get("value") in roles and not node.get("ignored")]
        assert len(found) > 20
        assert [node for node in found if not node.get("name", {}).get("value")] == []


def test_page_prints_with_everything_opened(made: Made, browser: Browser) -> None:
    browser.open(made[0] / "report.html", dark=True)
    browser.run(
        "const count = () => document.querySelectorAll('details[open]').length;"
        "addEventListener('beforeprint', () => { window.printed = count(); })"
    )
    assert browser.pdf().startswith(b"%PDF-")
    assert browser.run("window.printed") == browser.run("document.querySelectorAll('details').length")
    assert browser.run("document.querySelectorAll('details[open]').length") == 0
    assert browser.problems == []
