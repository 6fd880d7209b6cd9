// Vectors: the texts nearest to a query, and how similar all texts are.

import {html} from "../vendor/htm-preact.js";
import {count, fixed, lines} from "../texts.js";
import {Ranked} from "./ranked.js";

const MOST = 20;

const dot = (a, b) => a.reduce((sum, value, at) => sum + value * b[at], 0);
const cosine = (a, b) => dot(a, b) / (Math.sqrt(dot(a, a) * dot(b, b)) || 1);

export function Vectors({values, answer}) {
  const texts = lines(values.texts), hasQuery = lines(values.query).length > 0;
  const vectors = answer.slice(answer.length - texts.length);
  const [first] = answer;
  return html`
    ${hasQuery && html`
      <h3>Nearest texts</h3>
      <${Nearest} query=${first} texts=${texts} vectors=${vectors} />`}
    ${vectors.length > 1 && html`
      <h3>Similarity</h3>
      <${Matrix} texts=${texts.slice(0, MOST)} vectors=${vectors.slice(0, MOST)} />`}
    <details>
      <summary>${count(answer.length, "vector")} of ${count(first.length, "number")}</summary>
      <pre tabindex="0">${answer.map(vector => `[${vector.slice(0, 8).map(number =>
        number.toFixed(3)).join(", ")}${vector.length > 8 ? ", …" : ""}]`).join("\n")}</pre>
    </details>`;
}

const Nearest = ({query, texts, vectors}) => Ranked({
  texts, scores: vectors.map((vector, index) => ({index, score: cosine(query, vector)})),
});

function Matrix({texts, vectors}) {
  return html`
    <div class="scroll" tabindex="0" role="group" aria-label="Cosine of each text with each other">
      <table class="matrix">
        <thead>
          <tr><td></td>${texts.map((text, index) => html`<th scope="col">${index + 1}</th>`)}</tr>
        </thead>
        <tbody>
          ${texts.map((text, row) => html`
            <tr>
              <th scope="row" dir="auto">${row + 1} ${text}</th>
              ${vectors.map(vector => {
                const value = cosine(vectors[row], vector);
                return html`<td style=${{"--share": `${40 * Math.max(0, value)}%`}}
                  >${fixed(value, 2)}</td>`;
              })}
            </tr>`)}
        </tbody>
      </table>
    </div>`;
}
