// A text with its entities marked.

import {html} from "../vendor/htm-preact.js";
import {parts, percent} from "../texts.js";

const HUES = 8;

/** A text with its entities marked, and those within them; of two that cross, the first. */
function marked(text, entities, hue) {
  return parts(text, entities).map(({text: words, span}) => {
    if (!span) return words;
    const inner = entities
      .slice(entities.indexOf(span) + 1)
      .filter(({start, end}) => start >= span.start && end <= span.end)
      .map(entity => ({
        ...entity, start: entity.start - span.start, end: entity.end - span.start,
      }));
    return html`<mark class=${`entity ${hue(span.label)}`} title=${percent(span.score)}
      >${marked(words, inner, hue)}<small>${span.label}</small></mark>`;
  });
}

export function Entities({values, answer}) {
  const entities = answer.map(entity => ({...entity, label: entity.entity_group ?? entity.entity}));
  const labels = [...new Set(entities.map(entity => entity.label))].sort();
  const hue = label => `hue-${labels.indexOf(label) % HUES}`;
  if (!entities.length) {
    return html`<p>Nothing is marked: the model finds no entity in this text.</p>`;
  }
  return html`
    <p class="passage" dir="auto" tabindex="0" role="group" aria-label="The text with its entities">
      ${marked(values.text, entities, hue)}
    </p>
    <div class="scroll" tabindex="0" role="group" aria-label="Entities">
      <table>
        <thead><tr><th>Entity</th><th>Label</th><th class="number">Score</th></tr></thead>
        <tbody>
          ${entities.slice(0, 200).map(entity => html`
            <tr>
              <td dir="auto">${entity.word}</td>
              <td><span class=${`tag ${hue(entity.label)}`}>${entity.label}</span></td>
              <td class="number">${percent(entity.score)}</td>
            </tr>`)}
        </tbody>
      </table>
    </div>`;
}
