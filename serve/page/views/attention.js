// How the heads of a layer attend: a square per head, and the chosen one as a heatmap or as lines.

import {html, useEffect, useRef, useState} from "../vendor/htm-preact.js";
import {attention} from "../attention.js";
import {ask} from "../server.js";

export function Attention({texts, model}) {
  const [found, setFound] = useState(null);
  const [problem, setProblem] = useState("");
  const drawing = useRef(null);
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
  useEffect(() => {
    if (!found) return;
    const {tokens, layer, weights} = found;
    const {element, draw} = attention({tokens, weights: [weights.map(rows => rows.flat())], first: layer});
    drawing.current.replaceChildren(element);
    draw();
  }, [found]);
  const id = `layer-of-${model.id}`;
  return html`
    <details onToggle=${event => event.target.open && !found && look()}>
      <summary>Attention</summary>
      ${problem && html`<p class="error">${problem}</p>`}
      ${found && html`
        <div class="heads">
          <label for=${id}>Layer</label>
          <select id=${id} onChange=${event => look(Number(event.target.value))}>
            ${Array.from({length: found.layers}, (_, at) => html`
              <option value=${at + 1} selected=${at + 1 === found.layer}>${at + 1}</option>`)}
          </select>
        </div>
        <p class="hint">A square per head: rows are the tokens that attend, columns those attended to.</p>
        <div ref=${drawing}></div>`}
    </details>`;
}
