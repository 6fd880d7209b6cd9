// Texts by score, best first.

import {fixed} from "../texts.js";
import {Bars} from "./bars.js";

/** Scores are {index, score}; those outside of 0 to 1 are drawn between their least and greatest. */
export function Ranked({texts, scores}) {
  const values = scores.map(({score}) => score);
  const isShare = values.every(score => score >= 0 && score <= 1);
  const [least, most] = [Math.min(...values, 0), Math.max(...values)];
  const share = score => isShare ? score : (score - least) / (most - least || 1);
  const rows = [...scores]
    .sort((a, b) => b.score - a.score)
    .map(({index, score}) => ({label: texts[index], share: share(score), shown: fixed(score, 3)}));
  return Bars({rows});
}
