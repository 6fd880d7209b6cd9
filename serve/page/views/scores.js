// A number per text.

import {html} from "../vendor/htm-preact.js";
import {fixed, lines} from "../texts.js";
import {Ranked} from "./ranked.js";

export function Scores({values, answer}) {
  if (answer.length === 1) {
    return html`<p class="figure">${fixed(answer[0].score, 3)}</p>`;
  }
  return Ranked({
    texts: lines(values.text), scores: answer.map(({score}, index) => ({index, score})),
  });
}
