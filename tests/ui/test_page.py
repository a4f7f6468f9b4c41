"""Covers the page in a real browser, on a node with ten thousand Services and an in-memory kernel.

``tests/daemon/ui`` covers the figures that the page shows. If ``IPVSPROXY_PICTURES=1`` is set, these tests also make the pictures
in docs/images.
"""

import contextlib
import errno
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, Route, expect

from ipvsproxy.daemon.ui import pages
from ipvsproxy.model.service import ApiObject
from ipvsproxy.model.virtual_servers import RealServers
from tests.support import page_scene
from tests.support.builders import OTHER_NODE, endpoint
from tests.support.page_node import PageNode
from tests.ui.conftest import Running, running

IMAGES = Path(__file__).parents[2] / "docs/images"
PARTS = {
    "node": "#/node",
    "services": "#/services?sort=connections",
    "service": f"#/service/{page_scene.WEB}",
    "events": "#/events",
}
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
Look = Callable[..., Page]


def _is_complete(page: Page, part: str) -> None:
    """Wait until a view of the page shows its figures."""
    awaited = {
        "node": "figure path.line[d*='L']",
        "services": "tbody tr:nth-child(50) .spark",
        "service": ".endpoint",
        "events": "tbody tr",
    }
    page.locator(awaited[part]).first.wait_for(state="attached")


# What is shown.


def test_the_node_page_shows_the_last_syncs_and_that_everything_is_programmed(looking: Look) -> None:
    page = looking(PARTS["node"])
    _is_complete(page, "node")
    expect(page.locator(".verdict")).to_contain_text("Everything is in force")
    expect(page.locator("#verdict")).to_have_text("✓ in force")
    expect(page.get_by_text("10,000").first).to_be_visible()
    assert page.locator("figure").count() == 6
    for text in ("API server", "iptables nft", "Scheduler", "EndpointSlice"):
        expect(page.get_by_text(text).first).to_be_visible()
    assert page.title() == "Node \N{EN DASH} ipvsproxy"
    for time in page.locator("time").all_text_contents():
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", time)


def test_plots_have_complete_axes_and_a_maximum_and_a_total_and_a_crosshair(looking: Look) -> None:
    page = looking(PARTS["node"])
    _is_complete(page, "node")
    figures, times = page.locator("figure"), page.locator("figcaption small")
    expect(figures.nth(1)).to_contain_text(re.compile(r"active \d+ · max \d+inactive \d+ · max \d+"))
    expect(figures.nth(3)).to_contain_text(re.compile(r"in [\d.]+\sMB/s · max [\d.]+\sMB/s · total [\d.]+\sGB"))
    expect(figures.nth(2)).to_contain_text(re.compile(r"out [\d.]+\sk/s · max [\d.]+\sk/s · total [\d.]+\sM"))
    expect(figures.nth(4)).to_contain_text(re.compile(r"\d Services? · max 9 Services · total \d+ Services"))
    assert all(tick.isdecimal() for tick in figures.nth(4).locator(".ticks span").all_text_contents())
    box = figures.first.locator("svg").bounding_box()
    assert box
    minutes = []
    for part in (0.1, 0.9):
        page.mouse.move(box["x"] + box["width"] * part, box["y"] + 20)
        expect(page.locator(".cross")).to_have_count(6)
        expect(times.last).to_have_text(re.compile(r"^\d\d:\d\d:\d\d UTC$"))
        hour, minute, *_ = (times.last.text_content() or "").split(":")
        minutes.append(int(hour) * 60 + int(minute))
    assert 11 <= (minutes[1] - minutes[0]) % 1440 <= 13
    # The crosshair of a bar chart is at the nearest bar.
    bars = figures.nth(4).locator("svg")
    box = bars.bounding_box()
    assert box
    first = bars.locator(".bars").evaluate("path => parseFloat(path.getAttribute('d').slice(1))")
    page.mouse.move(box["x"] + box["width"] * (first + 5) / 900, box["y"] + 20)
    expect(figures.nth(4)).to_contain_text(re.compile(r"UTC[1-9] Services?"))
    page.mouse.move(5, 5)
    expect(times).to_have_text(["now"] * 6)
    page.locator(".plots").focus()
    page.keyboard.press("ArrowLeft")
    expect(page.locator(".cross")).to_have_count(6)


def test_the_node_page_does_not_name_iptables_if_nftables_holds_the_rules(looking: Look) -> None:
    def in_nftables(route: Route) -> None:
        answer = route.fetch()
        route.fulfill(response=answer, body=answer.text().replace('"iptables":"nft"', '"iptables":"nftables"'))

    page = looking(PARTS["events"])
    page.route("**/node.json*", in_nftables)
    page.goto(page.url.partition("#")[0] + PARTS["node"])
    expect(page.get_by_text("nftables, in time").first).to_have_text(re.compile("^nftables"))
    expect(page.get_by_text("iptables")).to_have_count(0)


def test_ten_thousand_services_can_be_paged_through(looking: Look) -> None:
    page = looking("#/services")
    told = page.get_by_role("status")
    expect(told).to_have_text("10,000 Services")
    assert page.locator("tbody tr").count() == 50
    expect(page.get_by_text("Page 1 of 200")).to_be_visible()
    page.get_by_role("button", name="Next →").click()
    expect(page.get_by_text("Page 2 of 200")).to_be_visible()
    page.get_by_label("Rows").select_option("200")
    expect(page.get_by_text("Page 1 of 50")).to_be_visible()
    assert page.locator("tbody tr").count() == 200


def test_clicking_a_column_heading_sorts_the_services(looking: Look) -> None:
    page = looking("#/services?size=25")
    first = page.locator("tbody tr th a").first
    page.get_by_role("button", name="Connections/s").click()
    expect(first).to_have_text(page_scene.WEB)
    expect(page.locator("th[aria-sort=descending]")).to_have_text("Connections/s")
    page.get_by_role("button", name="Problem").click()
    expect(page.locator("tbody tr").first).to_contain_text("!")
    page.get_by_role("button", name="Service", exact=True).click()
    expect(page.locator("th[aria-sort=ascending]")).to_have_text("Service")
    page.get_by_role("button", name="Service", exact=True).click()
    expect(page.locator("th[aria-sort=descending]")).to_have_text("Service")
    expect(first).to_contain_text("team-39/")


def test_the_page_shows_the_services_that_the_node_finds_for_a_search(looking: Look) -> None:
    """``test_board`` tests which addresses and ports a search can contain."""
    page = looking("#/services")
    search = page.get_by_label("Search")
    for query, name in (("service-04321", "team-01/service-04321"), ("10.96.0.80:80", page_scene.WEB)):
        search.fill(query)
        expect(page.locator(f"tbody th a:text-is('{name}')")).to_be_visible()
        expect(page.get_by_role("status")).to_contain_text("of 10,000 Services")
        search.fill("there is no such Service")
        expect(page.get_by_text("No Service matches.")).to_be_visible()


def test_services_can_be_filtered_by_problem_and_namespace_and_type_and_node(looking: Look) -> None:
    page = looking("#/services?namespace=shop")
    told, rows = page.get_by_role("status"), page.locator("tbody tr")
    expect(told).to_have_text("7 of 10,000 Services")
    assert page.get_by_label("Namespace").input_value() == "shop"
    page.get_by_label("Problems only").check()
    expect(told).to_have_text("3 of 10,000 Services")
    expect(page.locator("tbody .problem")).to_contain_text(
        ["it has no endpoints", "its only endpoint is not used", "it has no endpoints"]
    )
    page.get_by_label("Problems only").uncheck()
    page.get_by_label("Type").select_option("LoadBalancer")
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text("shop/checkout")
    page.get_by_label("Type").select_option("any")
    page.get_by_label("Namespace").fill("")
    page.get_by_role("searchbox", name="Node").fill("node-c")
    expect(told).to_have_text("1 of 10,000 Services")
    expect(rows).to_contain_text(page_scene.WEB)
    assert page.url.endswith("#/services?node=node-c")
    page.reload()
    expect(told).to_have_text("1 of 10,000 Services")


def test_the_column_of_problems_is_visible_on_a_page_of_1280_pixels_despite_long_port_names(looking: Look) -> None:
    page = looking("#/services?namespace=shop", width=1280)
    expect(page.locator("tbody .ports", has_text="metrics-scraper")).to_contain_text("grpc-management")
    assert (page.locator("thead th").nth(1).text_content() or "").strip() == "Problem"
    assert page.locator(".services").evaluate("table => table.scrollWidth <= table.parentElement.clientWidth")


def test_the_diagram_of_a_service_leads_from_clients_to_endpoints_and_explains_unused_endpoints(looking: Look) -> None:
    page = looking(PARTS["service"])
    _is_complete(page, "service")
    for text in ("pod of this node", "outside of the cluster", "masqueraded", "TCP 10.96.0.80:80", "node port, rr"):
        expect(page.get_by_text(text, exact=True).or_(page.get_by_text(text)).first).to_be_visible()
    ins, outs = page.locator(".endpoint:not(.off)"), page.locator(".endpoint.off")
    assert (ins.count(), outs.count()) == (4, 2)
    expect(ins.first).to_contain_text("zone zone-a")
    expect(ins.first).to_contain_text("weight 1")
    expect(ins.locator("b")).to_have_text(["10.244.0.11:8080", *(re.compile("^web-7d9f5c8b64-") for _ in range(3))])
    expect(ins.nth(1)).to_contain_text("10.244.0.12:8080 · ready · this node · zone zone-a")
    expect(outs.nth(0)).to_contain_text("out: it is not ready")
    expect(outs.nth(1)).to_contain_text("out: it is terminating, and other endpoints are ready")
    assert page.locator("path.wire").count() == 8
    page.locator("summary").first.click()
    expect(page.locator(".rule code").first).to_contain_text("-t nat -A KUBE-SERVICES")
    page.context.grant_permissions(["clipboard-read"])
    rules = page.locator(".rule", has_text="2 rules")
    rules.locator("summary").click()
    expect(rules.locator("code").nth(1)).to_have_css("border-top-style", "solid")
    lines = rules.locator("code").all_text_contents()
    rules.get_by_role("button", name="Copy").click()
    assert page.evaluate("navigator.clipboard.readText()").splitlines() == lines
    assert len(lines) == 2
    expect(ins.first).to_contain_text(re.compile(r"\d\sk?conn/s"))  # after two readings


def test_the_page_of_a_service_explains_its_source_ranges_its_second_scope_and_direct_return(looking: Look) -> None:
    def with_direct_return(route: Route) -> None:
        answer = route.fetch().json()
        for port in answer["service"]["ports"]:
            scope = port["clusterScope"]
            end = {"realServer": "172.18.0.3:443", "weight": 2, "state": "serving by tunnel"}
            port["directReturn"] = scope | {"kernel": {"realServers": [*scope["kernel"]["realServers"], end]}}
            port["fromTunnels"] = scope
        route.fulfill(json=answer)

    page = looking("#/service/shop/checkout")
    expect(page.get_by_text("only from 198.51.100.0/24").first).to_be_visible()
    expect(page.get_by_text("second scope of")).to_be_visible()
    page.route("**/service.json*", with_direct_return)  # each further update gets this answer
    expect(page.get_by_text("clients outside", exact=True).first).to_be_visible()
    expect(page.get_by_text("tunnels of other nodes").first).to_be_visible()
    expect(page.get_by_text("by tunnel to")).to_have_text("by tunnel to 1 node: 172.18.0.3:443 (weight 2)")
    page.unroute("**/service.json*", with_direct_return)


def test_the_page_reports_a_service_that_does_not_exist(browser: Browser, node: Running) -> None:
    page = browser.new_page()  # not with the fixture `looking`, which fails the test if the browser logs a status such as 404
    for name in ("shop/nothing", "shop/web%E0%A4%A"):
        page.goto(f"{node.url}#/service/{name}")
        expect(page.get_by_role("alert")).to_contain_text(f"there is no Service {name}")
    page.close()


# Live.


def test_a_change_of_an_endpoint_is_shown_within_two_seconds(looking: Look, node: Running) -> None:
    """The page requests data once a second.

    The test measures no time, but the second answer after a change must show the change.
    """
    assert "const POLL_MS = 1000;" in (Path(pages.__file__).parent / "static/page.js").read_text()
    page = looking(PARTS["service"])
    table = looking(f"#/services?query={page_scene.WEB}")
    expect(page.locator(".endpoint", has_text="10.244.0.12:8080")).to_contain_text("✓ in")
    expect(table.locator("tbody tr")).to_contain_text("4 ready")
    try:
        with _two_answers_after(page_scene.web_slice(without="10.244.0.12"), page, "service", node):
            gone = page.locator(".endpoint", has_text="10.244.0.12:8080")
            expect(gone).to_contain_text("! draining")
            expect(gone).to_contain_text("its open connections continue")
        with _two_answers_after(page_scene.web_slice(endpoint("10.244.0.13"), without="10.244.0.12"), table, "services", node):
            expect(table.locator("tbody tr")).to_contain_text("4 ready 1 draining")
        expect(page.locator(".endpoint", has_text="10.244.0.13:8080")).to_contain_text("✓ in")
        events = looking(PARTS["events"])
        expect(events.locator("tbody tr").first).to_contain_text(f"{page_scene.WEB}: 10.244.0.13 (web-7d9f5c8b64-")
        expect(events.locator("tbody tr").first.get_by_role("link")).to_have_text(page_scene.WEB)
    finally:
        node.do(lambda one: one.kernel.connection_counts.clear())
        node.put(page_scene.web_slice())


@contextlib.contextmanager
def _two_answers_after(change: ApiObject, page: Page, what: str, node: Running) -> Iterator[None]:
    """Program a change, and answer only the page's first two requests while the ``with`` block runs."""
    node.put(change)
    routes: list[Route] = []

    def answer(route: Route) -> None:
        routes.append(route)
        if len(routes) <= 2:
            route.continue_()

    address = re.compile(rf"/{what}\.json")
    page.route(address, answer)
    yield
    page.unroute(address, answer)
    for route in routes[2:]:
        route.continue_()


def test_a_lost_connection_is_shown_until_the_node_answers_again(browser: Browser) -> None:
    page = browser.new_page()
    with running(20) as first:
        page.goto(f"{first.url}#/services")
        expect(page.get_by_role("status")).to_have_text("20 Services")
        expect(page.get_by_role("alert")).to_be_hidden()
        expect(page.locator("#verdict")).to_have_text("✓ in force")
    expect(page.get_by_role("alert")).to_contain_text(re.compile(r"The node has not answered since \d\d:\d\d:\d\d UTC"))
    expect(page.locator("#verdict")).to_have_text(re.compile(r"^not known since \d\d:\d\d:\d\d UTC$"))
    with running(30, first.port):
        expect(page.get_by_role("alert")).to_be_hidden()
        expect(page.locator("#verdict")).to_have_text("✓ in force")
        expect(page.get_by_role("status")).to_have_text("30 Services")
    page.close()


def test_events_of_a_restarted_process_are_not_mixed_with_events_of_the_earlier_process(browser: Browser) -> None:
    page = browser.new_page()
    rows = page.locator("tbody tr[data-kind=sync]")  # leaves out events about health, which a busy machine may cause
    with running(20) as first:
        first.put(page_scene.web_slice(endpoint("10.244.0.13")))
        page.goto(f"{first.url}#/events")
        expect(rows).to_have_count(2)
        expect(page.get_by_role("status")).to_contain_text("events")
    with running(30, first.port) as second:
        for number in (14, 15, 16):
            second.put(page_scene.web_slice(endpoint(f"10.244.0.{number}")))
        expect(rows).to_have_count(4)
        expect(rows.last).to_contain_text("30 Services changed")
    page.close()


def test_a_hidden_browser_tab_requests_no_document(looking: Look) -> None:
    page = looking(PARTS["services"])
    page.clock.install()
    page.reload()
    expect(page.locator("#verdict")).to_have_text("✓ in force")
    _is_complete(page, "services")
    page.evaluate(_VISIBILITY, True)
    page.wait_for_load_state("networkidle")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.clock.run_for(60_000)
    assert page.evaluate("document.hidden")
    assert asked == []
    with page.expect_request("**/services.json*"), page.expect_request("**/node.json*"):
        page.evaluate(_VISIBILITY, False)


_VISIBILITY = """hidden => {
    Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
    document.dispatchEvent(new Event("visibilitychange"));
}"""


def test_an_update_of_the_page_keeps_the_focus_and_the_selection_and_what_the_viewer_has_opened(looking: Look) -> None:
    page = looking(PARTS["node"], width=360)
    _is_complete(page, "node")
    syncs, time_of_figures = page.get_by_role("region", name="The last syncs"), page.locator(".note")
    syncs.focus()
    syncs.evaluate("region => { region.scrollLeft = 40; getSelection().selectAllChildren(region.querySelector('th')); }")
    before = time_of_figures.text_content() or ""
    expect(time_of_figures).not_to_have_text(before)
    expect(syncs).to_be_focused()
    assert syncs.evaluate("region => [region.scrollLeft, getSelection().toString()]") == [40, "Ended"]
    service = looking("#/service/shop/peers")
    service.locator(".left summary").click()
    for _ in range(2):  # the page draws the first answer before it requests the second one
        with service.expect_response("**/service.json*"):
            pass
    expect(service.locator(".left[open]")).to_have_count(1)


def test_an_unknown_link_within_the_page_leads_to_the_node_view(looking: Look) -> None:
    page = looking("#/constructor")
    expect(page.get_by_role("heading", level=1)).to_have_text("Node")
    for part in ("#/__proto__/x", "#/%E0%A4%A", "#/nothing"):
        page.keyboard.press("e")
        expect(page.get_by_role("heading", level=1)).to_have_text("Events")
        page.evaluate("part => { location.hash = part; }", part)
        expect(page.get_by_role("heading", level=1)).to_have_text("Node")


# Hostile names.


def test_the_page_shows_hostile_names_as_plain_text(looking: Look) -> None:
    page = looking("#/services?query=onerror")
    link = page.locator("tbody tr th a")
    expect(link).to_have_text(f"shop/{page_scene.HOSTILE}")
    link.click()
    expect(page.get_by_role("heading", level=1)).to_have_text(f"shop/{page_scene.HOSTILE}")
    expect(page.locator(".endpoint")).to_contain_text(f"{page_scene.HOSTILE} · zone {page_scene.HOSTILE}")
    expect(page.locator(".endpoint b")).to_have_text(page_scene.HOSTILE)
    assert page.locator("main img").count() == 0
    assert page.evaluate("document.title") == f"shop/{page_scene.HOSTILE} \N{EN DASH} ipvsproxy"


# Keys.


def test_the_whole_page_can_be_used_with_the_keyboard(looking: Look) -> None:
    page = looking(PARTS["node"])
    _is_complete(page, "node")
    page.keyboard.press("/")
    expect(page.get_by_label("Search")).to_be_focused()
    page.keyboard.type("shop/")
    expect(page.get_by_role("status")).to_contain_text("of 10,000 Services")
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    links = page.locator("tbody tr th a")
    expect(links.nth(0)).to_be_focused()
    page.keyboard.press("j")
    expect(links.nth(1)).to_be_focused()
    page.keyboard.press("k")
    name = links.nth(0).text_content()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text(name or "")
    page.keyboard.press("s")
    expect(page.get_by_role("status")).to_have_text("10,000 Services")
    page.keyboard.press("]")
    expect(page.get_by_text("Page 2 of 200")).to_be_visible()
    page.keyboard.press("[")
    expect(page.get_by_text("Page 1 of 200")).to_be_visible()
    page.keyboard.press("e")
    expect(page.get_by_role("heading", level=1)).to_have_text("Events")
    page.keyboard.press("n")
    expect(page.get_by_role("heading", level=1)).to_have_text("Node")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()


def test_the_focus_stays_on_a_row_that_is_updated_or_moves(looking: Look) -> None:
    page = looking("#/services?sort=connections")
    _is_complete(page, "services")
    link = page.locator(f"th a:text-is('{page_scene.WEB}')")
    link.focus()
    row = page.locator("tbody tr", has=link)
    figures = row.locator("td[data-label='Connections/s']")
    before = figures.text_content() or ""
    expect(figures).not_to_have_text(before)
    expect(link).to_be_focused()
    # The row is moved and focused in one call, so that the page is not updated in between.
    last = row.evaluate(
        "row => { row.parentElement.append(row); row.querySelector('a').focus(); return row === row.parentElement.lastChild }"
    )
    assert last
    page.wait_for_function(
        "name => [...document.querySelectorAll('tbody a')].slice(0, 40).some(link => link.textContent === name)",
        arg=page_scene.WEB,
    )
    expect(link).to_be_focused()


def test_the_chosen_theme_is_remembered(looking: Look) -> None:
    page = looking(PARTS["events"])
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.keyboard.press("t")
    page.keyboard.press("t")
    expect(page.get_by_role("button", name="Theme: dark")).to_be_visible()
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert light != dark
    page.reload()
    expect(page.get_by_role("button", name="Theme: dark")).to_be_visible()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == dark


# Tests of accessibility, themes and sizes.


@pytest.mark.parametrize("part", PARTS)
def test_each_view_is_accessible_in_both_themes_and_fits_a_phone_and_a_printed_page(looking: Look, part: str) -> None:
    page = looking(PARTS[part])
    _is_complete(page, part)
    shown = page.request.get(
        page.url.partition("#")[0] + (page.get_by_role("link", name="JSON of this page").get_attribute("href") or "")
    )
    assert part in ("node", "events") or page_scene.WEB in shown.text()
    assert shown.ok
    for theme in SCHEMES:
        page.emulate_media(color_scheme=theme)
        found = Axe().run(page)
        assert found.violations_count == 0, (theme, found.generate_report())
    page.emulate_media(media="print")
    expect(page.get_by_role("navigation")).to_be_hidden()
    expect(page.get_by_role("button", name="Keys")).to_be_hidden()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)", "also in the dark theme"
    page.emulate_media(media="screen")
    for width in (1440, 1280, 768, 390, 360):
        page.set_viewport_size({"width": width, "height": 780})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate("document.querySelector('header').clientHeight") < 60, "one row"
        assert page.evaluate(_FILLED), "each row of tiles and plots fills its grid"
        for table in page.locator(".services").all() if width >= 1280 else ():
            assert table.evaluate("table => table.scrollWidth <= table.parentElement.clientWidth"), "no column is out of sight"


_FILLED = """() => [...document.querySelectorAll(".tiles, .plots")].every(grid => {
    const right = grid.getBoundingClientRect().right, boxes = [...grid.children].map(child => child.getBoundingClientRect());
    return boxes.every((box, index) => box.top === boxes[index + 1]?.top || Math.abs(box.right - right) < 2);
})"""


# Tests that make the pictures of the documentation.


def _tell_a_story(node: Running) -> None:
    """Cause events: a new endpoint, another endpoint whose programming fails once, the removal of both endpoints, and drift."""
    near, far = endpoint("10.244.0.13"), endpoint("10.244.1.13", OTHER_NODE)
    node.put(page_scene.web_slice(near))
    node.do(lambda one: one.kernel.fail(lambda operation: isinstance(operation.item, RealServers), errno.ENOMEM))
    node.put(page_scene.web_slice(near, far))
    node.put(page_scene.web_slice())

    def drift(one: PageNode) -> None:
        for key in list(one.kernel.virtual_servers)[:2]:
            del one.kernel.virtual_servers[key]

    node.do(drift)


@pytest.mark.skipif(not os.environ.get("IPVSPROXY_PICTURES"), reason="the pictures are made anew only where this is asked for")
@pytest.mark.parametrize(
    ("picture", "part_and_more"),
    [
        ("ui-node", ("node", {})),
        ("ui-services", ("services", {})),
        ("ui-service", ("service", {"theme": "dark"})),
        ("ui-events", ("events", {})),
        ("ui-phone", ("service", {"width": 390, "height": 844})),
    ],
)
def test_each_page_can_be_saved_as_a_picture(
    looking: Look, node: Running, picture: str, part_and_more: tuple[str, dict[str, object]]
) -> None:
    part, more = part_and_more
    page = looking(PARTS[part], **more)
    _is_complete(page, part)
    if part == "events":
        _tell_a_story(node)
        page.get_by_text("! drift").first.wait_for()
    page.wait_for_timeout(20_000)  # after 20 s, the page has enough points to draw a line beside each figure
    IMAGES.mkdir(exist_ok=True)
    assert len(page.screenshot(path=IMAGES / f"{picture}.png")) > 10_000
