// The page: which model is asked what, and its answers.

import {Calls, Copy} from "./calls.js";
import {ModelCard} from "./card.js";
import {Field} from "./fields.js";
import {Result} from "./result.js";
import {apiKey, ask, keepKey} from "./server.js";
import {fieldsOf, initialValues, requestOf, TASKS} from "./tasks.js";
import {html, render, useEffect, useRef, useState} from "./vendor/htm-preact.js";
import * as link from "./link.js";

/** A model's name as the choices show it: versions of one model are told apart. */
const titleOf = ({id, card}) => card.version ? `${id}, version ${card.version}` : id;
const tasksOf = ({card}) => card ? [card.task, ...card.also].filter(task => task in TASKS) : [];

function App() {
  const [models, setModels] = useState([]);
  const [problem, setProblem] = useState("");
  const [needsKey, setNeedsKey] = useState(false);
  async function list() {
    try {
      const {content} = await ask("/v1/models");
      setModels(content.data);
      setProblem("");
      setNeedsKey(false);
    } catch (refusal) {
      setNeedsKey(refusal.status === 401);
      setProblem(refusal.message);
    }
  }
  useEffect(() => { list(); }, []);
  const able = models.filter(model => tasksOf(model).length);
  const down = models.filter(model => !model.card);
  return html`
    <header>
      <h1>raybert</h1>
      <nav aria-label="Server"><a href="docs">API</a></nav>
      <${Key} isOpen=${needsKey} onKey=${list} />
    </header>
    <main>
      ${problem && html`<p class="error card" role="alert">${problem}</p>`}
      ${down.map(({id, problem: why}) => html`
        <p class="note card">${id} does not answer at the moment: ${why}</p>`)}
      ${able.length > 0 && html`<${Desk} models=${able} />`}
    </main>`;
}

/** An API key, typed once and kept until the tab is closed. */
function Key({isOpen, onKey}) {
  const [key, setKey] = useState(apiKey());
  function submit(event) {
    event.preventDefault();
    keepKey(key.trim());
    onKey();
  }
  return html`
    <details class="key" open=${isOpen}>
      <summary>API key</summary>
      <form onSubmit=${submit}>
        <label for="key">API key</label>
        <input id="key" type="password" autocomplete="off" value=${key}
          aria-describedby="key-hint" onInput=${event => setKey(event.target.value)} />
        <button>Use</button>
        <p class="hint" id="key-hint">Kept by this tab until you close it, and sent to this server only.</p>
      </form>
    </details>`;
}

/** What the address asks for, as far as these models can do it. */
function start(models) {
  const held = link.read();
  const model = models.find(({id}) => id === held?.model) ?? models[0];
  const tasks = tasksOf(model);
  const task = tasks.includes(held?.task) ? held.task : tasks[0];
  const isHeld = held?.hasInput && held.model === model.id && held.task === task;
  return {
    model, task, isHeld,
    other: models.find(({id}) => id === held?.other && id !== model.id),
    shown: isHeld ? -1 : 0, // which of the model's examples
    values: isHeld ? held.values : initialValues(task, model.card),
  };
}

function Desk({models}) {
  const [{model, task, other, shown, values}, setState] = useState(() => start(models));
  const [results, setResults] = useState([]);
  const running = useRef(new AbortController());
  const rivals = models.filter(each => each.id !== model.id && tasksOf(each).includes(task));
  const titleOfName = id => titleOf(models.find(each => each.id === id));
  const asked = [model, ...rivals.includes(other) ? [other] : []];

  function choose(changes) {
    running.current.abort();
    setResults([]);
    setState(state => ({...state, ...changes}));
  }
  function chooseModel(id) {
    const chosen = models.find(each => each.id === id);
    const [first] = tasksOf(chosen);
    choose({model: chosen, task: first, shown: 0, values: initialValues(first, chosen.card)});
  }
  const chooseTask = name =>
    choose({task: name, shown: 0, values: initialValues(name, model.card)});
  function showNextExample() {
    const next = (shown + 1) % model.card.examples.length;
    choose({shown: next, values: initialValues(task, model.card, next)});
  }

  function run() {
    running.current.abort();
    const control = running.current = new AbortController();
    link.write({model: model.id, task, other: asked[1]?.id, values});
    const number = Date.now();
    const begun = asked.map(each => ({model: each, task, values, number}));
    setResults(begun);
    begun.forEach(async (result, place) => {
      const {path, body} = requestOf(task, values);
      const tell = news => setResults(before =>
        before.map((old, at) => at === place ? {...result, ...news} : old));
      try {
        const answer = await ask(result.model.url + path, body, control.signal);
        if (!control.signal.aborted) tell({answer});
      } catch (refusal) {
        if (!control.signal.aborted) tell({problem: refusal.message});
      }
    });
  }

  const begin = useRef(start(models).isHeld);
  useEffect(() => {
    if (begin.current) run();
    begin.current = false;
    const follow = () => {
      const next = start(models);
      choose(next);
      begin.current = next.isHeld;
    };
    window.addEventListener("hashchange", follow);
    return () => window.removeEventListener("hashchange", follow);
  }, [model, task, other, values]);

  return html`
    <div class="choices-of-model">
      <${Choice} label="Model" value=${model.id} names=${models.map(({id}) => id)}
        titles=${titleOfName} onChoose=${chooseModel} />
      ${tasksOf(model).length > 1 && html`
        <${Choice} label="Task" value=${task} names=${tasksOf(model)}
          titles=${name => TASKS[name].title} onChoose=${chooseTask} />`}
      ${rivals.length > 0 && html`
        <${Choice} label="Side by side with" value=${asked[1]?.id ?? ""}
          names=${["", ...rivals.map(({id}) => id)]} titles=${name => name ? titleOfName(name) : "no other model"}
          onChoose=${id => choose({other: models.find(each => each.id === id)})} />`}
    </div>
    <div class=${asked.length > 1 ? "desk compared" : "desk"}>
      <form class="card" onSubmit=${event => { event.preventDefault(); run(); }}>
        <h2>${TASKS[task].title}</h2>
        ${fieldsOf(task).map(field => html`
          <${Field} key=${`${model.id} ${task} ${field.name}`} field=${field} value=${values[field.name]}
            onInput=${value => setState(state =>
              ({...state, values: {...state.values, [field.name]: value}}))} />`)}
        <div class="actions">
          <button class="primary">Ask the model</button>
          <button type="button" onClick=${showNextExample}>Example</button>
          ${results.length > 0 && html`<${Copy} text=${location.href} label="Copy link" />`}
        </div>
      </form>
      <div class="results" aria-live="polite">
        ${results.length ? results.map(result => html`
          <${Result} key=${`${result.model.id} ${result.number}`} result=${result} />`)
          : html`<p class="empty">The answer appears here.</p>`}
      </div>
    </div>
    <${Calls} model=${model} task=${task} values=${values} />
    ${asked.map(each => html`<${ModelCard} key=${each.id} model=${each} />`)}`;
}

function Choice({label, value, names, titles = name => name, onChoose}) {
  const id = `choose-${label.toLowerCase().replaceAll(" ", "-")}`;
  return html`
    <div>
      <label for=${id}>${label}</label>
      <select id=${id} value=${value} onChange=${event => onChoose(event.target.value)}>
        ${names.map(name => html`<option value=${name} selected=${name === value}>${titles(name)}</option>`)}
      </select>
    </div>`;
}

render(html`<${App} />`, document.body);
