// A model's answer to an input: its view, what was cut, what it took, and the tokens.

import {html} from "./vendor/htm-preact.js";
import {TASKS} from "./tasks.js";
import {count} from "./texts.js";
import {Attention} from "./views/attention.js";
import {Tokens} from "./views/tokens.js";

export function Result({result}) {
  const {model, task, values, problem, answer} = result;
  const version = answer?.version ?? model.card.version; // it may have changed since the page opened
  return html`
    <section class="card result" aria-label=${`Answer of ${model.id}`} data-model=${model.id}>
      <h2>
        Answer of ${model.id}
        ${" "}${version && html`<span class="tag">version ${version}</span>`}
      </h2>
      ${problem ? html`<p class="error" role="alert">${problem}</p>`
        : answer === undefined ? html`<p class="hint" role="status">Asking the model …</p>`
        : html`<${Answer} ...${{model, task, values, answer}} />`}
    </section>`;
}

function Answer({model, task, values, answer}) {
  const cutOf = new Map(answer.cuts.map(cut => [cut.place, cut]));
  const texts = TASKS[task].texts(values).map(text => ({...text, cut: cutOf.get(text.place)}));
  return html`
    ${texts.filter(({cut}) => cut).map(({name, cut}) => html`
      <p class="note">${name} was too long for the model, which read it ${
        cut.isStart ? "from" : "up to"} character ${cut.at.toLocaleString("en")}.</p>`)}
    <${TASKS[task].view} values=${values} answer=${answer.content} model=${model} />
    <p class="timing">${timing(answer)}</p>
    <${Tokens} texts=${texts} model=${model} />
    ${model.card.backend === "torch" && html`<${Attention} texts=${texts} model=${model} />`}`;
}

function timing({totalMs, stages, tokens, isKept}) {
  const parts = [`${totalMs.toFixed(1)} ms`];
  if (tokens) parts.push(count(Number(tokens), "token"));
  parts.push(...stages.map(([name, ms]) => `${name} ${ms.toFixed(1)} ms`));
  if (isKept) parts.push("cached answer");
  return parts.join(" · ");
}
