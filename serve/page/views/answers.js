// The answer highlighted in its passage, and the runners-up.

import {html, useState} from "../vendor/htm-preact.js";
import {parts, percent} from "../texts.js";
import {width} from "./bars.js";

export function Answers({values, answer}) {
  const answers = [answer].flat();
  const [chosen, setChosen] = useState(0);
  const shown = answers[Math.min(chosen, answers.length - 1)];
  const spans = shown.answer ? [shown] : [];
  return html`
    <p class="passage" dir="auto" tabindex="0" role="group" aria-label="The passage with the answer">
      ${parts(values.context, spans).map(({text, span}) =>
        span ? html`<mark class="answer">${text}</mark>` : text)}
    </p>
    <ol class="bars choices">
      ${answers.map((each, index) => html`
        <li key=${index} class=${index === 0 ? "best" : ""}>
          <button type="button" class="label" dir="auto" aria-pressed=${String(each === shown)}
            onClick=${() => setChosen(index)}>${each.answer || "no answer in the passage"}</button>
          <span class="value">${percent(each.score)}</span>
          <span class="track" aria-hidden="true"><span style=${width(each.score)}></span></span>
        </li>`)}
    </ol>`;
}
