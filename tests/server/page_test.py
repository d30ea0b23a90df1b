#!/usr/bin/env python3
"""The built-in page in a real browser: a chat to its end, stopped and asked again, the API's description, a wrong and a
right key, and the cluster while an attention worker is killed. Arguments: the dovetail binary, a model.
DOVETAIL_PICTURES names a folder for pictures of each. Skipped (77) where there is no Chromium.
"""
import os
import pathlib
import signal
import sys

PROJECT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(PROJECT / "tests" / "control"))
import browser  # noqa: E402
import processes  # noqa: E402

KEY = "key-of-the-page"
ENTER = ("Enter", 13, "\r")
PICTURES = os.environ.get("DOVETAIL_PICTURES")


def picture(page, name):
    if PICTURES:
        page.picture(os.path.join(PICTURES, name + ".png"))


def ask(page, text, most):
    page.run(f"element('max-tokens').value = {most}; element('temperature').value = 0; element('prompt').focus()")
    page.write(text)
    page.press(*ENTER)


def gives_the_key(page):
    page.wait_for("!element('key-form').hidden")
    for key in ("wrong", KEY):
        page.run("element('key').value = ''; element('key').focus()")
        page.write(key)
        page.press(*ENTER)
        if key != KEY:
            page.wait_for("element('key-note').textContent.includes('not accepted')")
    page.wait_for("element('model').textContent === 'tales' && element('key-form').hidden")


def chats(page):
    ask(page, "Tell me a tale.", 24)
    page.wait_for("document.querySelector('.assistant .about')?.textContent.includes('length')")
    about = page.run("document.querySelector('.assistant .about').textContent")
    assert "+ 24 tokens" in about and "tok/s" in about and "first token after" in about, about
    first = page.run("document.querySelector('.assistant .text').textContent")
    assert len(first) > 10, first
    assert page.run("element('stop').disabled && !element('send').disabled")
    picture(page, "chat")
    page.run("element('again').click()")
    page.wait_for("document.querySelectorAll('.assistant').length === 1 && !element('again').disabled &&"
                  " document.querySelector('.assistant .about')?.textContent.includes('length')")
    assert page.run("document.querySelector('.assistant .text').textContent") == first, "the same at temperature 0"


def stops(page):
    """At its first token: thousands would follow."""
    page.run("""new MutationObserver((_, observer) => {
                  const about = document.querySelectorAll('.assistant')[1]?.querySelector('.about');
                  if (!about?.textContent.includes('first')) return;
                  observer.disconnect();
                  document.dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape'}));
                }).observe(element('log'), {childList: true, subtree: true})""")
    ask(page, "And another, a long one.", 3500)
    page.wait_for("document.querySelectorAll('.assistant .about')[1]?.textContent.endsWith('stopped')")
    assert page.run("turns.length") == 4, "what was there when it was stopped is part of the conversation"
    page.run("element('clear').click()")
    assert page.run("turns.length === 0 && element('log').childElementCount === 0")


def shows_what_models_write(page):
    """Markdown, and nothing of it as HTML."""
    page.run(r"""element('log').append(markdown.render('# One\n\n- a **b**\n- `c`\n\n```js\nlet x = "<b>";\n```\n'
                 + '<img src=x onerror="document.title = 1"> [l](https://example.com) [m](javascript:alert(1))'))""")
    html = page.run("element('log').innerHTML")
    for part in ("<h3>One</h3>", "<li>a <strong>b</strong></li>", "<li><code>c</code></li>", "&lt;b&gt;",
                 "&lt;img src=x", '<a href="https://example.com"', "[m](javascript:alert(1))"):
        assert part in html, (part, html)
    assert page.run("document.title") == "Dovetail"
    page.run("element('clear').click()")


def shows_thoughts_and_calls(page):
    page.run("""showAnswer(addMessage('assistant', ''), {content: 'Seen.', reasoning: 'Hm.', usage: null, finish: 'x',
                  calls: [{id: 'c', function: {name: 'get_weather', arguments: '{"city": "Rome"}'}}]},
                {sent: 0, first: 0, last: 0, tokens: 0})""")
    text = page.run("document.querySelector('.assistant').textContent")
    for part in ("Thoughts", "Hm.", "Seen.", "get_weather", '{"city": "Rome"}'):
        assert part in text, text
    page.run("element('clear').click()")


def describes_the_api(page, url):
    page.open(url + "/docs")
    page.wait_for("document.querySelectorAll('.operation').length > 10")
    text = page.run("element('operations').textContent")
    assert "POST /v1/chat/completions" in text and "temperature" in text, text[:500]
    picture(page, "docs")


def shows_the_cluster(page, cluster):
    page.open(cluster.url + "/")
    page.wait_for("element('model').textContent === 'tales'")
    ask(page, "Tell me a tale.", 24)
    page.wait_for("document.querySelector('.assistant .about')?.textContent.includes('length')")
    page.run("element('tab-cluster').click()")
    page.wait_for("[...document.querySelectorAll('#workers tbody tr')].length === 3")
    shown = page.run("element('cluster').innerText")
    for part in ("attention-1", "attention-2", "compute-1", "tokens/s", "decode", "prefill", "Tell me a tale."):
        assert part in shown, (part, shown)
    victim = page.wait_for("[...known].find(([, one]) => one.role === 'attention' && one.worker_steps > 0)?.[0]")
    os.kill(cluster.pid_of(victim), signal.SIGKILL)
    page.wait_for(f"element('events').textContent.match('{victim} (is gone|was lost)')")
    picture(page, "cluster-lost")
    page.wait_for(f"element('events').textContent.match('{victim} (has joined|was lost and has joined)')")
    page.resize(400, 800, mobile=True)
    wide = "[...document.querySelectorAll('body *')].filter((e) => e.getBoundingClientRect().right > 400)"
    assert page.run(f"{wide}.map((e) => e.outerHTML.slice(0, 80))") == [], "nothing is wider than a phone"
    page.run("element('theme').click()")
    picture(page, "cluster-phone")


def main(binary, model):
    flags = ("--served-model-name", "tales", "--chat-template", "chatml")
    with browser.Browser() as page:
        with processes.Process(binary, "serve", model, "--port", "0", *flags,
                               environment={"DOVETAIL_API_KEY": KEY}) as server:
            url = server.wait_for(r"listening on (http://\S+)").group(1)
            processes.wait_until_ready(url)
            page.open(url + "/")
            gives_the_key(page)
            for part in (chats, stops, shows_what_models_write, shows_thoughts_and_calls):
                part(page)
            describes_the_api(page, url)
        with processes.Up(binary, model, *flags, "--attention-workers", "2") as cluster:
            shows_the_cluster(page, cluster)
        refused = [one for one in page.problems() if "401" not in str(one)]
        assert not refused, refused


if __name__ == "__main__":
    if browser.BROWSER is None:
        print("skipped: no chromium")
        sys.exit(77)
    main(sys.argv[1], sys.argv[2])
