// The tokens of the texts with their ids, and those that were cut.

import {html, useState} from "../vendor/htm-preact.js";
import {ask} from "../server.js";
import {count} from "../texts.js";

const MOST = 400;

/** Texts are {name, text, cut}: a cut says from or up to which character a text was read. */
export function Tokens({texts, model}) {
  const [found, setFound] = useState(null);
  const [problem, setProblem] = useState("");
  async function open(event) {
    if (!event.target.open || found) return;
    try {
      const {content} = await ask(`${model.url}/tokenize`, {inputs: texts.map(({text}) => text)});
      setFound(content);
    } catch (refusal) {
      setProblem(refusal.message);
    }
  }
  return html`
    <details onToggle=${open}>
      <summary>Tokens</summary>
      ${problem && html`<p class="error">${problem}</p>`}
      ${found?.map((tokens, place) => html`
        <${Text} ...${texts[place]} tokens=${tokens} />`)}
    </details>`;
}

function Text({name, tokens, cut}) {
  const isCut = ({start, stop, special}) =>
    cut !== undefined && !special && (cut.isStart ? start < cut.at : stop > cut.at);
  const lost = tokens.filter(isCut).length;
  return html`
    <p class="name">${name}: ${count(tokens.length, "token")}${lost > 0 && `, ${lost.toLocaleString("en")} cut`}</p>
    <ul class="tokens" dir="auto">
      ${tokens.slice(0, MOST).map(token => html`
        <li class=${token.special ? "special" : isCut(token) ? "cut" : ""}>
          ${token.text}<small>${token.id}</small>
        </li>`)}
      ${tokens.length > MOST && html`
        <li class="more">and ${(tokens.length - MOST).toLocaleString("en")} more</li>`}
    </ul>`;
}
