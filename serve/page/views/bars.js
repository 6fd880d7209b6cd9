// Shares as bars, the first ten until all are asked for.

import {html, useState} from "../vendor/htm-preact.js";
import {percent} from "../texts.js";

const FEW = 10;

export const width = share => ({inlineSize: `${100 * Math.max(0, Math.min(1, share))}%`});

/** Rows are {label, share, shown}; `shown` stands for the share if it is no percentage. */
export function Bars({rows}) {
  return html`<${Listed} rows=${rows} />`;
}

function Listed({rows}) {
  const [all, setAll] = useState(false);
  const visible = all ? rows : rows.slice(0, FEW);
  return html`
    <ol class="bars">
      ${visible.map(({label, share, shown}, index) => html`
        <li key=${index} class=${index === 0 ? "best" : ""}>
          <span class="label" dir="auto">${label}</span>
          <span class="value">${shown ?? percent(share)}</span>
          <span class="track" aria-hidden="true"><span style=${width(share)}></span></span>
        </li>`)}
    </ol>
    ${rows.length > FEW && html`
      <button type="button" class="quiet" onClick=${() => setAll(!all)}>
        ${all ? `Show the first ${FEW}` : `Show all ${rows.length}`}
      </button>`}`;
}
