"""The page at `/` in Chromium, asking a live server: every view, alone and within reach of all."""

import contextlib
import io
import json
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
import numpy as np
import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from bert_core.bundle.format import load_bundle
from bert_core.metrics.vector_forms import unit
from bert_core.tasks.catalog import TASKS
from serve.http.app import LocalModel, create_front_app
from serve.request import auth
from serve.request.auth import Keys
from serve.versions.loaded_model import LoadedModel
from serve.versions.plan import Plan, Source
from tests import tiny
from tests.pages import assert_within_reach
from tests.serve import live
from tracking.models.references import Reference
from tracking.models.registry import Release, publish
from tracking.store.server import connect

CLASSES = "text-classification"
expect.set_options(timeout=30_000)  # machines are shared

FOLLOW_S = 0.2
ODD = """<img src=x onerror="document.title='caught'"> 😀 it's \\ "so" """


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A tab that nobody has used, in which nothing must go wrong unheard."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    page, heard = context.new_page(), list[str]()
    page.set_default_timeout(30_000)
    page.on("pageerror", lambda error: heard.append(str(error)))
    page.on("console", lambda message: heard.append(message.text))
    page.on("request", lambda request: heard.append(request.url))
    yield page
    context.close()
    # The browser itself tells of every answer that is an error.
    usual = ("http://127.0.0.1:", "data:,", "about:blank", "Failed to load resource")
    assert [each for each in heard if not each.startswith(usual)] == []


@dataclass(frozen=True)
class Case:
    """What is typed for a task, and what has to be seen of the server's answer."""

    model: str
    typed: dict[str, str]
    path: str
    body: dict[str, Any]


TEXT = "Open a socket and listen on a port."
TEXTS = ["Parse a string as JSON.", "The lazy dog jumps.", TEXT]
MARKED = "Open a <e1>socket</e1> and listen on a <e2>port</e2>."
PAIR = {"text": TEXT, "text_pair": TEXTS[1]}
CASES = {
    CLASSES: Case(CLASSES, {"Text": ODD}, "", {"inputs": ODD}),
    "zero-shot-classification": Case(
        "nli",
        {"Text": TEXT, "Labels": "net\nsport"},
        "",
        {"inputs": TEXT, "parameters": {"candidate_labels": ["net", "sport"]}},
    ),
    "text-regression": Case(
        "text-regression",
        {"Texts": PAIR["text"], "Second text": PAIR["text_pair"]},
        "",
        {"inputs": [PAIR]},
    ),
    "text-ranking": Case(
        "text-ranking",
        {"Query": TEXT, "Passages": "\n".join(TEXTS)},
        "/rerank",
        {"query": TEXT, "texts": TEXTS},
    ),
    "token-classification": Case("token-classification", {"Text": ODD}, "", {"inputs": ODD}),
    "relation-classification": Case(
        "relation-classification", {"Text": MARKED}, "", {"inputs": [MARKED]}
    ),
    "span-classification": Case("span-classification", {"Text": TEXT}, "", {"inputs": TEXT}),
    "question-answering": Case(
        "question-answering",
        {"Question": "Where?", "Passage": f"😀 {TEXT}"},
        "",
        {"inputs": {"question": "Where?", "context": f"😀 {TEXT}"}, "parameters": {"top_k": 5}},
    ),
    "multiple-choice": Case(
        "multiple-choice",
        {"Text": TEXT, "Choices": "\n".join(TEXTS)},
        "",
        {"inputs": {"text": TEXT, "choices": TEXTS}},
    ),
    "next-sentence-prediction": Case(
        "next-sentence-prediction",
        {"Sentence": PAIR["text"], "Next sentence": PAIR["text_pair"]},
        "",
        {"inputs": PAIR},
    ),
    "fill-mask": Case(
        "fill-mask",
        {"Text": "Open a [MASK]. Then [MASK] it."},
        "",
        {"inputs": "Open a [MASK]. Then [MASK] it."},
    ),
    "feature-extraction": Case(
        "feature-extraction",
        {"Find the nearest to": "a query", "Texts": "\n".join(TEXTS)},
        "",
        {"inputs": ["a query", *TEXTS]},
    ),
    "sentence-similarity": Case(
        "feature-extraction",
        {"Sentence": TEXT, "Compared with": "\n".join(TEXTS[:2])},
        "",
        {"inputs": {"source_sentence": TEXT, "sentences": TEXTS[:2]}},
    ),
    "minimal-pairs": Case(
        "minimal-pairs",
        {"Sentence": TEXTS[0], "Other sentence": TEXTS[1]},
        "",
        {"inputs": {"sentence_good": TEXTS[0], "sentence_bad": TEXTS[1]}},
    ),
    "sparse-embedding": Case(
        "sparse-embedding", {"Text": TEXT}, "", {"inputs": TEXT, "parameters": {"top_k": 50}}
    ),
}


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def shown(task: str, answer: Any, url: str) -> list[str]:
    """What the view of an answer shows, in order."""
    match task:
        case "text-classification" | "relation-classification" | "next-sentence-prediction":
            return [part for each in answer[0] for part in (each["label"], percent(each["score"]))]
        case "zero-shot-classification":
            return [part for each in answer for part in (each["label"], percent(each["score"]))]
        case "multiple-choice":
            return [part for each in answer[0] for part in (each["choice"], percent(each["score"]))]
        case "text-regression":
            return [f"{answer[0]['score']:.3f}"]
        case "text-ranking":
            return [part for each in answer
                    for part in (TEXTS[each["index"]], f"{each['score']:.3f}")]  # fmt: skip
        case "sentence-similarity":
            best = sorted(zip(answer, TEXTS, strict=False), reverse=True)
            return [part for score, text in best for part in (text, f"{score:.3f}")]
        case "token-classification":
            parts = [ODD[each["start"] : each["end"]] for each in answer]
            labels = [each["entity_group"] for each in answer]
            return [part for pair in zip(parts, labels, strict=True) for part in pair]
        case "span-classification":  # nested: in order in the table
            return [part for each in answer for part in (each["word"], each["entity_group"])]
        case "question-answering":
            return [part for each in answer for part in (each["answer"], percent(each["score"]))]
        case "fill-mask":
            return [part for mask in answer for each in mask
                    for part in (each["token_str"], percent(each["score"]))]  # fmt: skip
        case "feature-extraction":
            vectors = unit(np.array(answer))
            query, *cosines = vectors @ vectors.T
            best = sorted(zip(query[1:], TEXTS, strict=True), reverse=True)
            nearest = [part for score, text in best for part in (text, f"{score:.3f}")]
            matrix = [f"{round(score, 2) + 0.0:.2f}" for row in cosines for score in row[1:]]
            return [*nearest, *matrix, f"4 vectors of {len(answer[0])} numbers"]
        case "minimal-pairs":
            scores = answer[0]["score_good"], answer[0]["score_bad"]
            best = sorted(zip(scores, TEXTS, strict=False), reverse=True)
            return [part for score, text in best for part in (text, f"{score:.2f} nats")]
        case _:
            entries = sorted(answer[0], key=lambda entry: -entry["value"])[:10]
            ids = {"ids": [[entry["index"]] for entry in entries]}
            words = httpx.post(f"{url}/v1/models/{task}/decode", json=ids).json()
            values = [f"{entry['value']:.3f}" for entry in entries]
            return [part for pair in zip(words, values, strict=True) for part in pair]


def has_in_order(text: str, parts: Sequence[str]) -> bool:
    """Whether a text has all parts, each after the one before it."""
    start = 0
    for part in parts:
        found = text.find(part, start)
        if found < 0:
            return False
        start = found + len(part)
    return True


def ask(page: Page, url: str, model: str, task: str, typed: dict[str, str]) -> Locator:
    """Type an input and ask. Returns: what shows the answer."""
    page.goto(url)
    page.get_by_label("Model", exact=True).select_option(model)
    if page.get_by_label("Task", exact=True).count():
        page.get_by_label("Task", exact=True).select_option(task)
    for label, text in typed.items():
        page.get_by_label(label, exact=True).fill(text)
    page.get_by_role("button", name="Ask the model").click()
    result = page.get_by_role("region", name=f"Answer of {model}", exact=True)
    expect(result.locator(".timing")).to_contain_text("compute")
    return result


def assert_calls_work(page: Page, task: str, answer: Any) -> None:
    """The calls that the page shows, as they are copied, give this answer."""
    languages = page.get_by_role("group", name="Language").get_by_role("button").all_inner_texts()
    assert languages == ["curl", "Python", *["OpenAI"] * (task == "feature-extraction"),
                         "JavaScript"]  # fmt: skip
    for language in languages:
        page.get_by_role("button", name=language, exact=True).click()
        page.get_by_role("button", name="Copy the call").click()
        expect(page.get_by_text("Copied").last).to_be_visible()
        source = page.evaluate("navigator.clipboard.readText()")
        if language == "curl":
            command = ["bash", "-c", source.replace("curl", "curl --silent", 1)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
            assert json.loads(done.stdout) == answer
        elif language == "JavaScript":
            told = "async source => { let told; await new (async () => {}).constructor('console',"
            told += " source)({log: value => { told = value }}); return told; }"
            assert page.evaluate(told, source) == answer
        else:
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                exec(compile(source, language, "exec"), {})
            numbers = re.findall(r"-?\d+\.\d+", json.dumps(answer))
            assert numbers[0][:5] in output.getvalue()


@pytest.mark.parametrize("task", TASKS)
def test_a_tasks_view_shows_what_the_server_answers_and_how_to_ask(
    task: str, front: str, page: Page
) -> None:
    case = CASES[task]
    result = ask(page, front, case.model, task, case.typed)
    url = f"{front}/v1/models/{case.model}{case.path}"
    answer = httpx.post(url, json=case.body, timeout=30).json()
    parts = shown(task, answer, front)
    # The words of a sparse vector come from another request.
    live.eventually(lambda: has_in_order(result.evaluate("element => element.textContent"), parts))
    if task == "token-classification":
        marks = result.locator("mark").evaluate_all("all => all.map(one => one.firstChild.data)")
        assert marks == [ODD[each["start"] : each["end"]] for each in answer]
    if task == "question-answering":
        for each in answer[:2]:
            result.get_by_role("button", name=each["answer"], exact=True).first.click()
            if each["answer"]:
                assert result.locator("mark").text_content() == each["answer"]
    if task == "fill-mask":
        result.get_by_role("button").nth(1).click()
        filled = f"Open a {answer[0][1]['token_str']}. Then {answer[1][0]['token_str']} it."
        assert result.locator(".passage").text_content() == filled
    result.get_by_text("Tokens", exact=True).click()
    expect(result.locator(".tokens").first).to_contain_text("[CLS]")
    assert page.title() == "raybert"  # ODD is a text, not a part of the page
    assert_within_reach(page)
    assert_calls_work(page, task, answer)


def test_a_link_holds_the_input(front: str, page: Page) -> None:
    ask(page, front, "nli", "zero-shot-classification", {"Text": ODD, "Labels": "a\nb"})
    page.get_by_role("button", name="Copy link").click()
    expect(page.get_by_text("Copied")).to_be_visible()
    link = page.evaluate("navigator.clipboard.readText()")
    page.goto("about:blank")
    page.goto(link)
    expect(page.locator(".timing")).to_contain_text("compute")
    assert page.get_by_label("Task", exact=True).input_value() == "zero-shot-classification"
    assert page.get_by_label("Text", exact=True).input_value() == ODD
    assert page.get_by_label("Labels", exact=True).input_value() == "a\nb"


@pytest.mark.parametrize("held", ["{", "3", "null", '{"text": 5}'])
def test_a_damaged_link_is_an_empty_form(held: str, front: str, page: Page) -> None:
    page.goto(f"{front}/#{urlencode({'model': CLASSES, 'task': CLASSES, 'input': held})}")
    expect(page.get_by_role("button", name="Ask the model")).to_be_visible()


def test_two_models_answer_side_by_side(front: str, page: Page) -> None:
    page.goto(front)
    page.get_by_label("Model", exact=True).select_option(CLASSES)
    page.get_by_label("Side by side with").select_option("nli")
    page.get_by_label("Text", exact=True).fill(TEXT)
    page.get_by_role("button", name="Ask the model").click()
    boxes: list[Any] = []
    for model in (CLASSES, "nli"):
        result = page.get_by_role("region", name=f"Answer of {model}", exact=True)
        [best, *_] = httpx.post(f"{front}/v1/models/{model}", json={"inputs": TEXT}).json()[0]
        expect(result.locator(".best")).to_contain_text(best["label"])
        expect(result.locator(".best")).to_contain_text(percent(best["score"]))
        boxes.append(result.bounding_box())
    assert boxes[0]["y"] == boxes[1]["y"]
    assert boxes[0]["x"] + boxes[0]["width"] < boxes[1]["x"]
    assert_within_reach(page)


@pytest.fixture(scope="module")
def versions(
    bundles: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str]]:
    """URL of a server of a registered model's champion, version 2, and of its version 1; and the
    registry's URI."""
    folder, first = tmp_path_factory.mktemp("versions"), bundles[CLASSES]
    uri, loaded = f"sqlite:///{folder}/mlflow.db", load_bundle(bundles[CLASSES])
    second = tiny.bundle(
        folder / "second", loaded.tokenizer, loaded.encoder_config, task=loaded.task, seed=8
    )
    for version in (first, second):
        publish(Release(bundle=version, name="docs", metrics={}, input_example=TEXTS), uri=uri)
    connect(uri).set_registered_model_alias("docs", "champion", "2")
    served = {
        name: LoadedModel(
            Plan(
                name=name,
                source=Source(reference=Reference.parse(reference), tracking_uri=uri),
                follow_s=FOLLOW_S,
            )
        )
        for name, reference in {"docs": "models:/docs@champion", "before": "models:/docs/1"}.items()
    }
    front = {name: LocalModel(model.slot) for name, model in served.items()}
    with live.running(create_front_app(front)) as url:
        yield url, uri
    for model in served.values():
        model.close()


def test_two_versions_of_a_registered_model_answer_side_by_side(
    versions: tuple[str, str], page: Page
) -> None:
    url, uri = versions
    page.goto(url)
    page.get_by_label("Model", exact=True).select_option(label="docs, version 2")
    page.get_by_label("Side by side with").select_option(label="before, version 1")
    page.get_by_label("Text", exact=True).fill(TEXT)
    page.get_by_role("button", name="Ask the model").click()
    scores = []
    for model, version in (("docs", "2"), ("before", "1")):
        result = page.get_by_role("region", name=f"Answer of {model}", exact=True)
        answer = httpx.post(f"{url}/v1/models/{model}", json={"inputs": TEXT})
        assert answer.headers["X-Model-Version"] == version
        expect(result.get_by_text(f"version {version}", exact=True)).to_be_visible()
        best = answer.json()[0][0]
        expect(result.locator(".best")).to_contain_text(percent(best["score"]))
        scores.append(best)
    assert scores[0] != scores[1]
    assert_within_reach(page)
    # An open page tells which version has answered, not which one answered when it was opened.
    connect(uri).set_registered_model_alias("docs", "champion", "1")
    card = f"{url}/v1/models/docs"
    live.eventually(lambda: httpx.get(card).json()["version"] == "1")
    page.get_by_role("button", name="Ask the model").click()
    result = page.get_by_role("region", name="Answer of docs", exact=True)
    expect(result.get_by_text("version 1", exact=True)).to_be_visible()


def test_a_head_can_be_chosen_and_its_attention_is_announced(front: str, page: Page) -> None:
    model = "question-answering"
    result = ask(page, front, model, model, {"Question": "Where?", "Passage": TEXT})
    result.get_by_text("Attention", exact=True).click()
    result.get_by_label("Layer", exact=True).select_option("1")
    result.get_by_role("button", name="layer 1, head 2").click()
    body = {"text": "Where?", "text_pair": TEXT, "layer": 1}
    found = httpx.post(f"{front}/v1/models/{model}/attention", json=body).json()
    result.get_by_role("img", name="Heatmap of layer 1, head 2").press("ArrowDown")
    first, second = found["tokens"][:2]
    told = f"“{second}” attends to “{first}”: {percent(found['weights'][1][1][0])}"
    expect(result.locator("output")).to_have_text(told)
    assert_within_reach(page)
    result.get_by_role("button", name="lines").click()
    place = found["tokens"].index("socket")
    result.locator("svg text").nth(2 * place).hover()
    share, most = max(zip(found["weights"][1][place], found["tokens"], strict=True))
    expect(result.locator("output")).to_contain_text(f"attends to “{most}” {percent(share)}, ")
    assert_within_reach(page)


@pytest.fixture(scope="module")
def examined(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a front whose models `own` and `vectors` have examples, and `other` has none."""
    folder, loaded = tmp_path_factory.mktemp("examined"), load_bundle(bundle)
    models = {"own": (loaded.task, [TEXT, PAIR, TEXTS[1]]),
              "vectors": (TASKS["feature-extraction"](), [f"{TEXT}\n\n{TEXTS[1]}"])}  # fmt: skip
    for name, (task, examples) in models.items():
        about: dict[str, Any] = {"task": task, "examples": examples}
        tiny.bundle(folder / name, loaded.tokenizer, loaded.encoder_config, **about)
    with live.fronted({name: folder / name for name in models} | {"other": bundle}) as url:
        yield url


def test_the_button_goes_through_the_models_own_examples(examined: str, page: Page) -> None:
    page.goto(examined)
    text, pair = (page.get_by_label(name, exact=True) for name in ("Text", "Second text"))
    button = page.get_by_role("button", name="Example", exact=True)
    for _ in range(2):
        expect(text).to_have_value(TEXT)
        expect(pair).to_have_count(0)
        button.click()
        expect(text).to_have_value(PAIR["text"])
        expect(pair).to_have_value(PAIR["text_pair"])
        button.click()
        expect(text).to_have_value(TEXTS[1])
        button.click()
    button.click()
    page.get_by_label("Model", exact=True).select_option("other")
    for _ in range(2):  # the task's only example
        expect(text).to_have_value("A text to be labelled.")
        button.click()
    page.get_by_label("Model", exact=True).select_option("vectors")
    lines = page.get_by_label("Texts", exact=True).input_value().split("\n")
    assert lines[0] == f"{TEXT} {TEXTS[1]}", "a line is a text"


def test_after_the_input_of_a_link_comes_the_first_example(examined: str, page: Page) -> None:
    held = {"model": "own", "task": CLASSES, "input": json.dumps({"text": "Mine."})}
    page.goto(f"{examined}/#{urlencode(held)}")
    text = page.get_by_label("Text", exact=True)
    expect(text).to_have_value("Mine.")
    page.get_by_role("button", name="Example", exact=True).click()
    expect(text).to_have_value(TEXT)


def test_a_key_is_typed_once_and_kept_by_the_tab(bundle: Path, page: Page) -> None:
    key, stored = auth.create("alice")
    with live.fronted({"docs": bundle}, keys=Keys([stored])) as url:
        page.goto(url)
        expect(page.get_by_role("alert")).to_contain_text("API key")
        assert_within_reach(page)
        page.get_by_label("API key", exact=True).fill(key)
        page.get_by_role("button", name="Use").click()
        page.get_by_role("button", name="Ask the model").click()
        expect(page.locator(".timing")).to_contain_text("compute")
        card = page.get_by_role("region", name="Model card of docs")
        expect(card).to_contain_text("accuracy0.7500")
        for language in ("curl", "Python", "JavaScript"):
            page.get_by_role("button", name=language, exact=True).click()
            code = page.locator(".code").inner_text()
            assert "RAYBERT_API_KEY" in code
            assert key not in code
        assert key not in page.url
        page.reload()
        page.get_by_role("button", name="Ask the model").click()
        expect(page.locator(".timing")).to_contain_text("compute")
        kept = "[JSON.stringify(localStorage), document.cookie]"
        assert page.evaluate(kept) == ["{}", ""]


def test_the_page_works_by_keyboard_alone(front: str, page: Page) -> None:
    page.goto(front)
    expect(page.get_by_role("button", name="Ask the model")).to_be_visible()

    def tab_to(name: str) -> None:
        for _ in range(40):
            page.keyboard.press("Tab")
            focused = "document.activeElement"
            labels = f"{focused}.labels?.[0]?.textContent ?? {focused}.textContent"
            if page.evaluate(labels).strip() == name:
                outline = page.evaluate(f"getComputedStyle({focused}).outlineStyle")
                assert outline != "none"
                return
        pytest.fail(f"{name} is not reached")

    tab_to("Model")
    page.keyboard.type("question")
    tab_to("Question")
    page.keyboard.press("Control+A")
    page.keyboard.type("Where?")
    page.keyboard.press("Control+Enter")
    expect(page.locator(".timing")).to_contain_text("compute")
    runner_up = page.locator(".choices button").nth(1)
    tab_to((runner_up.text_content() or "").strip())
    page.keyboard.press("Enter")
    tab_to("Python")
    page.keyboard.press("Space")
    expect(page.locator(".code")).to_contain_text("question_answering")


def test_a_text_from_right_to_left_is_shown_so(front: str, page: Page) -> None:
    hebrew = "שלום עולם, זה משפט ארוך."
    result = ask(page, front, "question-answering", "question-answering",
                 {"Question": "מה?", "Passage": hebrew})  # fmt: skip
    for place in (page.get_by_label("Passage", exact=True), result.locator(".passage")):
        assert place.evaluate("element => getComputedStyle(element).direction") == "rtl"
    assert page.locator("html").evaluate("element => getComputedStyle(element).direction") == "ltr"


def test_a_text_of_100_000_characters_is_read_as_far_as_it_goes(front: str, page: Page) -> None:
    text = "Open a socket. " * 6667
    page.goto(front)
    page.get_by_label("Model", exact=True).select_option(CLASSES)
    page.get_by_label("Text", exact=True).fill(text)
    page.get_by_role("button", name="Ask the model").click()
    expect(page.get_by_role("alert")).to_contain_text("to have it cut, or split the text")
    page.get_by_label("Cut texts that are too long").check()
    page.get_by_role("button", name="Ask the model").click()
    body = {"inputs": text, "parameters": {"truncation": True}}
    answer = httpx.post(f"{front}/v1/models/{CLASSES}", json=body)
    result = page.get_by_role("region", name=f"Answer of {CLASSES}")
    cut = int(answer.headers["X-Cut-Inputs"].split("@")[1])
    expect(result).to_contain_text(f"which read it up to character {cut}.")
    result.get_by_text("Tokens", exact=True).click()
    expect(result.locator(".tokens .more")).to_be_visible()
    tokens = httpx.post(f"{front}/v1/models/{CLASSES}/tokenize", json={"inputs": text}).json()[0]
    lost = sum(not token["special"] and token["stop"] > cut for token in tokens)
    expect(result).to_contain_text(f"{len(tokens):,} tokens, {lost:,} cut")
    result = ask(page, front, "token-classification", "token-classification", {"Text": text})
    assert result.locator(".passage").evaluate("element => element.clientHeight") < 500
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert_within_reach(page)


def test_a_refusal_is_explained_in_words(front: str, page: Page) -> None:
    page.goto(front)
    page.get_by_label("Model", exact=True).select_option("fill-mask")
    page.get_by_label("Text", exact=True).fill("There is nothing to fill.")
    page.get_by_role("button", name="Ask the model").click()
    body = {"inputs": "There is nothing to fill."}
    told = httpx.post(f"{front}/v1/models/fill-mask", json=body).json()["error"]
    expect(page.get_by_role("alert")).to_have_text(told)
    assert_within_reach(page)


def test_an_unreachable_server_is_explained_in_words(bundle: Path, page: Page) -> None:
    with live.fronted({"docs": bundle}) as url:
        page.goto(url)
        expect(page.get_by_role("button", name="Ask the model")).to_be_visible()
    page.get_by_role("button", name="Ask the model").click()
    expect(page.get_by_role("alert")).to_contain_text("does not answer: see whether the server")


def test_nothing_in_the_page_runs_but_its_own_files(front: str) -> None:
    response = httpx.get(front)
    policy = dict(
        part.strip().split(" ", 1)
        for part in response.headers["Content-Security-Policy"].split(";")
    )
    assert (policy["default-src"], policy["script-src"]) == ("'none'", "'self'")
    assert not re.search(r"<script(?![^>]*src=)|<style|\son\w+=", response.text)
