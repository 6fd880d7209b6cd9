// How a head attends: the words are shaded by the share of a word's attention that goes to each.

import {html, useState} from "../vendor/htm-preact.js";
import {ask} from "../server.js";
import {percent} from "../texts.js";

const MOST_TOLD = 3;

export function Attention({texts, model}) {
  const [found, setFound] = useState(null);
  const [problem, setProblem] = useState("");
  async function look(layer) {
    // The first input: lists have brackets in the names of their places.
    const [text, text_pair] = texts
      .filter(({place}) => place.startsWith("0.") && !place.includes("[")).map(each => each.text);
    try {
      const {content} = await ask(`${model.url}/attention`, {text, text_pair, layer});
      setFound(content);
      setProblem("");
    } catch (refusal) {
      setProblem(refusal.message);
    }
  }
  return html`
    <details onToggle=${event => event.target.open && !found && look()}>
      <summary>Attention</summary>
      ${problem && html`<p class="error">${problem}</p>`}
      ${found && html`<${Heads} found=${found} look=${look} name=${model.id} />`}
    </details>`;
}

function Heads({found: {tokens, special, layer, layers, weights}, look, name}) {
  const [head, setHead] = useState(0);
  const [from, setFrom] = useState(Math.max(0, special.indexOf(false)));
  const shares = weights[head][from];
  const most = shares.map((share, at) => [share, at]).sort(([a], [b]) => b - a).slice(0, MOST_TOLD);
  const numbers = length => Array.from({length}, (_, at) => at);
  const id = part => `${part}-of-${name}`;
  return html`
    <div class="heads">
      <label for=${id("layer")}>Layer</label>
      <select id=${id("layer")} onChange=${event => look(Number(event.target.value))}>
        ${numbers(layers).map(at => html`
          <option value=${at + 1} selected=${at + 1 === layer}>${at + 1}</option>`)}
      </select>
      <label for=${id("head")}>Head</label>
      <select id=${id("head")} onChange=${event => setHead(Number(event.target.value))}>
        ${numbers(weights.length).map(at => html`
          <option value=${at} selected=${at === head}>${at + 1}</option>`)}
      </select>
    </div>
    <p class="hint">Choose a word to see where its attention goes.</p>
    <div class="tokens" dir="auto">
      ${tokens.map((token, at) => html`
        <button type="button" aria-pressed=${String(at === from)}
          style=${{"--share": `${45 * Math.sqrt(shares[at])}%`}} title=${percent(shares[at])}
          onClick=${() => setFrom(at)}>${token}</button>`)}
    </div>
    <p class="told" role="status">“${tokens[from]}” attends to ${most.map(([share, at], place) =>
      `${place ? ", " : ""}“${tokens[at]}” ${percent(share)}`).join("")}</p>`;
}
