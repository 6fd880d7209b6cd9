// Candidates in place of masks.

import {html, useState} from "../vendor/htm-preact.js";
import {percent} from "../texts.js";
import {width} from "./bars.js";

const MASK = /\[MASK\]|<mask>/;

export function Masks({values, answer}) {
  const masks = Array.isArray(answer[0]) ? answer : [answer];
  const [chosen, setChosen] = useState({});
  const picked = place => masks[place]?.[chosen[place] ?? 0]?.token_str ?? "…";
  const between = values.text.split(MASK);
  return html`
    <p class="passage" dir="auto" tabindex="0" role="group" aria-label="The text, filled in">
      ${between.flatMap((text, place) => place === 0
        ? [text] : [html`<mark class="answer">${picked(place - 1)}</mark>`, text])}
    </p>
    ${masks.map((candidates, place) => html`
      ${masks.length > 1 && html`<h3>Mask ${place + 1}</h3>`}
      <ol class="bars choices">
        ${candidates.map(({token_str, score}, index) => html`
          <li key=${index} class=${index === 0 ? "best" : ""}>
            <button type="button" class="label" dir="auto"
              aria-pressed=${String(index === (chosen[place] ?? 0))}
              onClick=${() => setChosen({...chosen, [place]: index})}>${token_str}</button>
            <span class="value">${percent(score)}</span>
            <span class="track" aria-hidden="true"><span style=${width(score)}></span></span>
          </li>`)}
      </ol>`)}`;
}
