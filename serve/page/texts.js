// Texts as the server counts them: by Unicode code points, where JavaScript counts UTF-16 units.

export const lines = text => (text ?? "").split("\n").map(line => line.trim()).filter(Boolean);

export const count = (number, noun) =>
  `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;

export const percent = share => `${(100 * share).toFixed(1)} %`;

/** With so many decimals, and never "-0.00". */
export const fixed = (number, decimals) =>
  number.toFixed(decimals).replace(/^-(0\.?0*)$/, "$1");

/** The parts of a text at ascending [start, end) and between: [{text, span}, …]. */
export function parts(text, spans) {
  const points = Array.from(text), found = [];
  const add = (start, end, span) => {
    if (end > start) found.push({text: points.slice(start, end).join(""), span});
  };
  let at = 0;
  for (const span of spans) {
    if (span.start < at) continue;
    add(at, span.start);
    add(span.start, span.end, span);
    at = span.end;
  }
  add(at, points.length);
  return found;
}
