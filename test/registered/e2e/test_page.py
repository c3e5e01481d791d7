"""The live page in a real browser before a real server: figures, chat, stop, keys, a restart; nothing from elsewhere, no markup from the model."""
import time

import pytest

from kits.audit import assert_clean, wait_idle
from kits.browser import browser, complaints, requested_urls, why_no_browser
from kits.checkpoints import tiny
from kits.fake_planner import STATE
from kits.front import Front
from kits.front_server import FrontServer
from kits.server import Server
from kits.tiny_tokenizer import save_tiny_tokenizer
from sglane.configs.model_config import load_model_config

pytestmark = pytest.mark.skipif(bool(why_no_browser()), reason=why_no_browser())

SLOW = {"SGLANE_HOLD": '{"rank": 0, "point": "forward", "sleep_ms": 30}'}  # answers last long enough to be watched
KEY = "a-secret-key"
MARKUP = "<img src=x onerror=document.title='taken'><b>bold</b>"


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    tokenizer = save_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return ("--model-path", str(tiny("llama")), "--tokenizer-path", str(tokenizer), "--dtype", "float32", "--page-size", "8",
            "--max-total-tokens", "4096", "--skip-server-warmup", "--grammar-backend", "none")


@pytest.fixture(scope="module")
def server(flags):
    with Server(*flags, "--cp-size", "2", "--enable-cp-shared-kv", env=SLOW) as running:
        yield running


@pytest.fixture
def page(server):
    with browser() as driver:
        driver.get(server.url)
        wait_for(driver, "live")
        yield driver
        assert complaints(driver) == []
        assert not [url for url in requested_urls(driver) if not url.startswith((server.url + "/", "chrome:", "data:"))]


def by_id(driver, name):
    return driver.find_element("id", name)


def until(condition, what, timeout_s=40.0):
    """Wait for a true value and return it."""
    deadline_s = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline_s, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.05)
    return value


def wait_for(driver, state):
    until(lambda: by_id(driver, "state").get_attribute("data-state") == state, f"state {state!r}")


def send(driver, text, max_tokens=None, temperature=None):
    for name, value in (("max-tokens", max_tokens), ("temperature", temperature)):
        if value is not None:
            driver.execute_script("document.getElementById(arguments[0]).value = arguments[1]", name, value)
    by_id(driver, "question").send_keys(text + "\n")


def answers(driver):
    return driver.find_elements("css selector", ".message.assistant")


def text_of(message):
    return message.find_element("class name", "text").get_property("textContent")


def is_busy(message):
    return message.get_attribute("aria-busy") == "true"


def wait_done(driver, count):
    until(lambda: len(answers(driver)) == count and not is_busy(answers(driver)[-1]), f"answer {count}")
    return answers(driver)[-1]


def figures_under(message):
    """Prompt tokens and cached ones."""
    words = message.find_element("class name", "about").text.split()
    return int(words[0]), int(words[3])


def pages_shown(driver):
    """kind -> pages by lane."""
    found = {}
    for part in driver.find_elements("css selector", "#lanes .bars span"):
        found.setdefault(part.get_attribute("data-kind"), []).append(int(part.get_attribute("data-pages")))
    return found


def test_figures(server, page):
    server.generate(list(range(3, 90)), max_new_tokens=4, ignore_eos=True)
    wait_idle(server)
    ledger = server.kv_ledger()
    expected = {kind: ledger["device"][kind] for kind in ("held", "cached", "tickets", "free")}
    assert sum(expected["cached"]) > 5, "the test needs cached pages"
    until(lambda: pages_shown(page) == expected, f"bars {expected}")
    share = expected["free"][0] / ledger["device"]["total"][0]
    width = ("const bar = document.querySelector('#lanes [data-kind=free]'); "
             "return bar.getBoundingClientRect().width / bar.parentElement.getBoundingClientRect().width")
    until(lambda: abs(page.execute_script(width) - share) < 0.005, f"a bar of {share}")  # bars move to their length
    facts = by_id(page, "facts").text
    for word in ("llama", "4,096 tokens", "8 tokens", "unified", "cpu", "32 bit"):
        assert word in facts, (word, facts)
    assert (by_id(page, "running").text, by_id(page, "waiting").text) == ("0", "0")
    assert not by_id(page, "host-title").is_displayed() and not by_id(page, "key-button").is_displayed()


def test_chat_streams_and_later_turns_hit_the_cache(server, page):
    send(page, MARKUP, max_tokens=40, temperature=0)
    until(lambda: answers(page) and text_of(answers(page)[0]), "the first text")
    assert is_busy(answers(page)[0]), "the answer came at once: it was not streamed"
    until(lambda: by_id(page, "running").text == "1", "one running request")
    first = text_of(answers(page)[0])
    assert float(until(lambda: (text := by_id(page, "output-rate").text) not in ("0", "–") and text, "throughput")) > 0
    answer = wait_done(page, 1)
    assert text_of(answer).startswith(first) and len(text_of(answer)) > len(first)
    body = {"messages": [{"role": "user", "content": MARKUP}], "max_tokens": 40, "temperature": 0}
    assert text_of(answer) == server.ask("/v1/chat/completions", body)["choices"][0]["message"]["content"]
    assert page.find_element("css selector", ".message.user .text").get_property("textContent") == MARKUP
    assert not page.find_elements("css selector", "#log img, #log b") and page.title != "taken"
    send(page, "and on")
    (num_first, _), (num_prompt, num_cached) = figures_under(answer), figures_under(wait_done(page, 2))
    assert 50 < num_first <= num_cached < num_prompt  # the first prompt; its answer reads back as other tokens than were sampled
    by_id(page, "new-chat").click()
    assert not answers(page)


@pytest.mark.parametrize("way", ["button", "escape"])
def test_stop(server, page, way):
    send(page, "go on for long", max_tokens=1500, temperature=1)
    until(lambda: answers(page) and text_of(answers(page)[0]), "the first text")
    if way == "button":
        by_id(page, "stop").click()
    else:
        by_id(page, "question").send_keys("\ue00c")
    assert "stopped" in wait_done(page, 1).find_element("class name", "about").text
    assert by_id(page, "send").is_displayed() and not by_id(page, "stop").is_displayed()
    assert_clean(wait_idle(server, timeout_s=20.0))


def test_an_error_is_shown_and_the_question_stays(server):
    with browser() as page:  # the failed request is one of the console's complaints
        page.get(server.url)
        wait_for(page, "live")
        send(page, "hello", max_tokens=0)
        error = wait_done(page, 1).find_element("class name", "error").text
        assert "max_tokens" in error and by_id(page, "question").get_property("value") == "hello"
        send(page, "", max_tokens=5)
        assert text_of(wait_done(page, 2))


def test_headers_and_methods(server):
    answer = server.get("/")
    assert answer.headers["content-type"].startswith("text/html") and "default-src 'none'" in answer.headers["content-security-policy"]
    assert "unsafe" not in answer.headers["content-security-policy"]
    head = server._client.head("/")
    assert (head.status_code, head.text) == (200, "") and head.headers["content-length"] == str(len(answer.content))
    assert server.post("/").status_code == 405


def test_keys_and_a_restart(flags):
    with Server(*flags, "--api-key", KEY) as server, browser() as page:
        assert server.get("/").status_code == 200 and KEY not in server.get("/").text
        page.get(server.url)
        wait_for(page, "locked")
        assert "needs a key" in by_id(page, "notice").text
        for key, state in (("wrong", "locked"), (KEY, "live")):
            until(lambda: by_id(page, "key").is_displayed(), "the key dialog")
            by_id(page, "key").send_keys(key + "\n")
            if state == "locked":
                until(lambda: "refused" in by_id(page, "notice").text, "a refused key")
        wait_for(page, "live")
        assert not by_id(page, "key-dialog").is_displayed() and not by_id(page, "notice").is_displayed()
        send(page, "hello", max_tokens=5)
        assert text_of(wait_done(page, 1))
        server.stop()
        wait_for(page, "unreachable")
        assert "does not answer" in by_id(page, "notice").text
        server.start()
        server.wait_ready()
        wait_for(page, "live")
        until(lambda: sum(pages_shown(page)["cached"]) == 0, "an empty cache")


def test_the_host_tier_has_bars_of_its_own(monkeypatch):
    monkeypatch.setitem(STATE["kv_ledger"], "host", {"total": [400, 400], "free": [100, 400], "cached": [290, 0], "held": [0, 0], "tickets": [10, 0]})
    with Front(load_model_config(None, None), None) as front, browser() as page:
        page.get(front.url)
        wait_for(page, "live")
        assert pages_shown(page) == {kind: STATE["kv_ledger"]["device"][kind] for kind in ("held", "cached", "tickets", "free")}
        bars = page.find_elements("css selector", "#host-lanes .bars")
        assert [bar.get_attribute("aria-label") for bar in bars] == [
            "Lane 0: 0 held, 290 cached, 10 free soon, 100 free; 400 pages", "Lane 1: 0 held, 0 cached, 0 free soon, 400 free; 400 pages"]
        assert by_id(page, "host-title").is_displayed() and by_id(page, "waiting").text == "2"
        assert by_id(page, "hit-rate").text == "25%" and "tail_copy_skipped 2" in by_id(page, "facts").text


def test_a_server_that_starts_says_so():
    server = FrontServer("--model-path", str(tiny("llama")), "--skip-tokenizer-init", "--skip-server-warmup", env={"FRONT_SERVER_SLOW": "8"})
    with browser() as page:
        server.start()
        try:
            until(server.health, "an answer")
            page.get(server.url)
            wait_for(page, "starting")
            assert by_id(page, "notice").text == "the server is starting"
            wait_for(page, "live")
            send(page, "hello")
            assert "tokenizer" in wait_done(page, 1).find_element("class name", "error").text
        finally:
            server.stop()
