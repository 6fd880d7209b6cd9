// How heads attend to the tokens of a text. The served page imports this file, the page of
// `raybert inspect` has it inside.

let redraws = [];
function redraw() {
  redraws = redraws.filter(({element}) => element.isConnected);
  redraws.forEach(({draw}) => draw());
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
addEventListener("resize", redraw);

export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}
export const percent = share => (100 * share).toFixed(1) + " %";
// Most shares are a tenth or less: the square root keeps them visible.
const strength = share => Math.sqrt(Math.max(0, share));
function inked(context, element) {
  context.fillStyle = getComputedStyle(element).color;
  return alpha => { context.globalAlpha = alpha; };
}

/** A small square picture of a matrix, one pixel per number from 0 to 1. */
export function thumbnail(size, at, label) {
  const canvas = make("canvas", {width: size, height: size});
  const button = make("button", {className: "cell", type: "button", title: label}, canvas);
  button.setAttribute("aria-label", label);
  const draw = () => {
    const context = canvas.getContext("2d"), [r, g, b] = getComputedStyle(button).color.match(/\d+/g);
    const image = context.createImageData(size, size);
    for (let cell = 0; cell < size * size; cell++) image.data.set([r, g, b, 255 * strength(at(cell))], 4 * cell);
    context.putImageData(image, 0, 0);
  };
  redraws.push({element: button, draw});
  return {button, draw};
}
export function press(buttons, pressed) {
  buttons.forEach((button, place) => button.setAttribute("aria-pressed", place === pressed));
}

/**
 * A square per head, and the chosen head as a heatmap or as lines.
 *
 * `weights` has by layer and head the share of each token's attention that goes to each token, row
 * by row; `first` is the number of its first layer, `second` the place of the second text's first
 * token, `habits` shares by name, layer and head. The element is drawn by `draw` once it is in the
 * page.
 */
export function attention({tokens, weights, first = 1, second = tokens.length, habits = {}}) {
  const size = tokens.length, layers = weights.length, heads = weights[0].length;
  const grid = make("div", {className: "grid", role: "group"});
  grid.setAttribute("aria-label", "Heads");
  grid.style.gridTemplateColumns = `1.4rem repeat(${heads}, minmax(0, 7.5rem))`;
  grid.append(make("span"), ...[...Array(heads).keys()].map(head => make("span", {textContent: head + 1})));
  const cells = weights.flatMap((row, layer) => {
    grid.append(make("span", {textContent: layer + first}));
    return row.map((shares, head) => {
      const cell = thumbnail(size, at => shares[at], `layer ${layer + first}, head ${head + 1}`);
      cell.button.onclick = () => choose(layer, head);
      grid.append(cell.button);
      return cell;
    });
  });
  grid.onkeydown = event => {
    const steps = {ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0]}[event.key];
    if (!steps) return;
    event.preventDefault();
    choose((layer + steps[0] + layers) % layers, (head + steps[1] + heads) % heads);
    cells[layer * heads + head].button.focus();
  };

  const title = make("h3"), readout = make("output"), canvas = make("canvas", {tabIndex: 0}), figure = make("div", {className: "scroll"});
  const habit = make("p", {className: "faint"});
  const kinds = ["heatmap", "lines"].map(kind => make("button", {type: "button", textContent: kind, onclick: () => { view = kind; show(); }}));
  canvas.setAttribute("role", "img");
  readout.setAttribute("aria-live", "polite");
  let layer = 0, head = 0, view = "heatmap", row = null, column = null, cell = 1, left = 0, top = 0;
  const at = (from, to) => weights[layer][head][from * size + to];

  function tell() {
    if (row === null) { readout.textContent = view === "lines" ? "Point at a token." : "Point at a square, or use the arrow keys."; return; }
    const best = [...tokens.keys()].sort((a, b) => at(row, b) - at(row, a)).slice(0, 3);
    readout.textContent = column === null
      ? `“${tokens[row]}” attends to ` + best.map(to => `“${tokens[to]}” ${percent(at(row, to))}`).join(", ")
      : `“${tokens[row]}” attends to “${tokens[column]}”: ${percent(at(row, column))}`;
  }
  function heatmap() {
    const context = canvas.getContext("2d"), font = `${12}px system-ui, sans-serif`, ratio = devicePixelRatio || 1;
    context.font = font;
    left = top = Math.min(110, Math.max(...tokens.map(token => context.measureText(token).width))) + 8;
    const room = figure.clientWidth || 600;
    cell = Math.max(4, Math.min(30, Math.floor((room - left - 1) / size)));
    const width = left + cell * size + 1, height = top + cell * size + 1;
    Object.assign(canvas, {width: width * ratio, height: height * ratio});
    Object.assign(canvas.style, {width: width + "px", height: height + "px"});
    context.scale(ratio, ratio);
    const ink = getComputedStyle(document.body).color, every = Math.ceil(11 / cell);
    const alpha = inked(context, canvas);
    for (let from = 0; from < size; from++) for (let to = 0; to < size; to++) {
      alpha(strength(at(from, to)));
      context.fillRect(left + to * cell, top + from * cell, cell - (cell > 8), cell - (cell > 8));
    }
    context.fillStyle = ink;
    context.font = font;
    context.textBaseline = "middle";
    for (let place = 0; place < size; place++) {
      const chosen = place === row || place === column;
      if (place % every && !chosen) continue;
      alpha(row === null || chosen ? 1 : .55);
      const middle = (place + .5) * cell;
      context.textAlign = "right";
      if (place === row || place % every === 0) context.fillText(tokens[place], left - 5, top + middle, left - 6);
      context.save();
      context.translate(left + middle, top - 5);
      context.rotate(-Math.PI / 2);
      context.textAlign = "left";
      if (place === column || place % every === 0) context.fillText(tokens[place], 0, 0, top - 6);
      context.restore();
    }
    alpha(.25);
    context.strokeStyle = ink;
    context.strokeRect(left - .5, top - .5, cell * size + 1, cell * size + 1);
    if (second < size) [[0, second, size, second], [second, 0, second, size]].forEach(line => {
      const [x, y, toX, toY] = line.map(place => place * cell - .5);
      context.beginPath(); context.moveTo(left + x, top + y); context.lineTo(left + toX, top + toY); context.stroke();
    });
    alpha(1);
    if (row !== null && column !== null) context.strokeRect(left + column * cell - .5, top + row * cell - .5, cell, cell);
    canvas.setAttribute("aria-label", `Heatmap of layer ${layer + first}, head ${head + 1}: ${size} by ${size} tokens`);
  }
  canvas.onpointermove = event => {
    const box = canvas.getBoundingClientRect();
    const [to, from] = [event.clientX - box.left - left, event.clientY - box.top - top].map(place => Math.floor(place / cell));
    const inside = [to, from].every(place => place >= 0 && place < size);
    [row, column] = inside ? [from, to] : [null, null];
    heatmap(); tell();
  };
  canvas.onpointerleave = () => { row = column = null; heatmap(); tell(); };
  canvas.onkeydown = event => {
    const steps = {ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0]}[event.key];
    if (!steps) return;
    event.preventDefault();
    row = Math.min(size - 1, Math.max(0, (row ?? 0) + steps[0]));
    column = Math.min(size - 1, Math.max(0, (column ?? 0) + steps[1]));
    heatmap(); tell();
  };
  function lines() {
    const step = 20, height = size * step, drawing = (name, properties, text = "") => {
      const element = document.createElementNS("http://www.w3.org/2000/svg", name);
      for (const [key, value] of Object.entries(properties)) element.setAttribute(key, value);
      element.textContent = text;
      return element;
    };
    const svg = drawing("svg", {viewBox: `0 0 400 ${height}`, role: "img", "aria-label": `Lines from each token to those that it attends to, layer ${layer + first}, head ${head + 1}`});
    const middle = place => (place + .5) * step;
    for (let from = 0; from < size; from++) for (let to = 0; to < size; to++) {
      if (at(from, to) < .02 || (row !== null && row !== from)) continue;
      svg.append(drawing("line", {x1: 125, y1: middle(from), x2: 275, y2: middle(to), stroke: "currentColor", "stroke-width": 2, "stroke-opacity": at(from, to)}));
    }
    tokens.forEach((token, place) => {
      const look = () => { if (row !== place) { row = place; column = null; lines(); tell(); } };
      const weight = row === place ? "bold" : "normal", faded = row === null ? 1 : .25 + .75 * strength(at(row, place));
      const from = drawing("text", {x: 118, y: middle(place), "text-anchor": "end", "dominant-baseline": "central", "font-weight": weight}, token);
      from.onpointerenter = look;
      svg.append(from, drawing("text", {x: 282, y: middle(place), "dominant-baseline": "central", "fill-opacity": faded}, token));
    });
    svg.onpointerleave = () => { row = null; lines(); tell(); };
    figure.replaceChildren(svg);
  }
  function show() {
    title.textContent = `Layer ${layer + first}, head ${head + 1}`;
    habit.hidden = !Object.keys(habits).length;
    habit.textContent = "On average it gives " + Object.entries(habits).map(([name, shares]) => `${percent(shares[layer][head])} to ${name}`).join(", ") + ".";
    press(kinds, kinds.findIndex(kind => kind.textContent === view));
    row = column = null;
    if (view === "heatmap") { figure.replaceChildren(canvas); heatmap(); } else lines();
    tell();
  }
  function choose(newLayer, newHead) {
    [layer, head] = [newLayer, newHead];
    press(cells.map(cell => cell.button), layer * heads + head);
    cells.forEach((cell, place) => { cell.button.tabIndex = place === layer * heads + head ? 0 : -1; });
    show();
  }
  const element = make("div", {className: layers > 1 ? "attention two" : "attention"}, grid, make("div", {},
    make("div", {className: "bar"}, title, make("div", {className: "choice"}, ...kinds)), figure, readout, habit));
  redraws.push({element, draw: () => view === "heatmap" && heatmap()});
  return {element, draw() { cells.forEach(each => each.draw()); choose(0, 0); }};
}
