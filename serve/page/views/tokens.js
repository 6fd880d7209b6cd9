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
      const inputs = texts.map(({text}) => text);
      setFound(await ask(`${model.url}/tokenize`, {inputs}));
    } catch (refusal) {
      setProblem(refusal.message);
    }
  }
  return html`
    <details onToggle=${open}>
      <summary>Tokens</summary>
      ${problem && html`<p class="error">${problem}</p>`}
      ${found?.content.map((tokens, place) => html`
        <${Text} ...${texts[place]} tokens=${tokens} promptBytes=${found.promptBytes} />`)}
    </details>`;
}

/** Tokens have their places in bytes, a prompt before the text included; a cut in characters. */
function Text({name, text, tokens, cut, promptBytes}) {
  const read = cut && new TextEncoder().encode([...text].slice(0, cut.at).join(""));
  const at = promptBytes + (read?.length ?? 0);
  const isCut = ({start, stop, special}) =>
    cut !== undefined && !special && (cut.isStart ? start >= promptBytes && start < at : stop > at);
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
