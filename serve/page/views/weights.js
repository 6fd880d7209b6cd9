// The words of the vocabulary that a sparse vector weighs.

import {html, useEffect, useState} from "../vendor/htm-preact.js";
import {ask} from "../server.js";
import {Bars} from "./bars.js";

export function Weights({answer, model}) {
  const [words, setWords] = useState(null);
  const entries = [...answer[0]].sort((a, b) => b.value - a.value);
  useEffect(() => {
    const ids = entries.map(({index}) => [index]);
    const nameless = () => setWords(null);
    if (ids.length) {
      ask(`${model.url}/decode`, {ids}).then(({content}) => setWords(content), nameless);
    }
  }, [answer]);
  if (!entries.length) return html`<p>No word has a weight.</p>`;
  const most = entries[0].value;
  return html`<${Bars} rows=${entries.map(({index, value}, place) => ({
    label: words?.[place] ?? `token ${index}`, share: value / most, shown: value.toFixed(3),
  }))} />`;
}
