// What is known of a model: what it does, how good it is, and what it was made from.

import {html} from "./vendor/htm-preact.js";
import {count} from "./texts.js";

const short = digest => digest.slice(0, 12);
const figure = value => Number.isInteger(value) ? value.toLocaleString("en") : value.toFixed(4);

export function ModelCard({model}) {
  const {card} = model;
  const facts = [
    ["Task", [card.task, ...card.also].join(", ")],
    ["Version", card.version ?? "not from a registry"],
    ["Bundle", short(card.digest)],
    ["Reads up to", count(card.max_tokens, "token")],
    ["Computed by", `${card.backend}, ${card.precision}`],
    ["Labels", card.labels.length > 20
      ? `${card.labels.slice(0, 20).join(", ")} and ${card.labels.length - 20} more`
      : card.labels.join(", ")],
  ].filter(([, value]) => value);
  const metrics = Object.entries(card.metrics);
  const known = card.lineage.filter(({stage, hub}) => stage ?? hub);
  return html`
    <section class="card" aria-label=${`Model card of ${model.id}`}>
      <h2>Model card: ${model.id}</h2>
      ${card.note && html`<p class="note">${card.note}</p>`}
      ${card.problem && html`<p class="note">${card.problem}</p>`}
      <div class="columns">
        <dl>${facts.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>
        <div>
          <h3>Evaluation</h3>
          ${metrics.length ? html`
            <dl>${metrics.map(([name, value]) => html`
              <div><dt>${name}</dt><dd>${figure(value)}</dd></div>`)}</dl>`
            : html`<p class="hint">The model was not evaluated.</p>`}
        </div>
        <div>
          <h3>Made from</h3>
          ${known.length ? html`
            <ol class="lineage">${known.map(ancestor => html`<${Step} ...${ancestor} />`)}</ol>`
            : html`<p class="hint">The model does not record it.</p>`}
        </div>
      </div>
    </section>`;
}

const Step = ({stage, digest, hub, data}) => html`
  <li>
    <strong>${stage ?? hub}</strong> <code>${short(digest)}</code>
    ${data.map(({name, source, counts}) => html`
      <span class="hint">${[name, source, ...Object.entries(counts).map(([what, number]) =>
        `${number.toLocaleString("en")} ${what}`)].filter(Boolean).join(" · ")}</span>`)}
  </li>`;
