// What all pages are made of: elements, figures for people, small lines and plots.
// Rule: text of the API becomes text nodes only. Nothing here reads HTML.

export const SPAN_S = 900;
const BAR_S = 10; // a bar is as wide as a few points: near it, the crosshair means it
const SVG = "http://www.w3.org/2000/svg";

// An element: el("a", {class: "x", href: "#/"}, "text", child, null). Functions under "on…" are listeners; false and null are left out.
export function el(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

export function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, String(value));
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

// Give an element a text, and leave it alone if it has that already: screen readers and selections notice a change.
export function write(element, text) {
  if (element.textContent !== String(text)) element.textContent = text;
}

// Make the children of an element equal to these, and leave alone what is equal already: the focus, a selection, the place in a
// long table and opened details stay. Only for elements without listeners: those that are there keep theirs.
export function patch(parent, children) {
  const fresh = document.createDocumentFragment();
  fresh.append(...children);
  match(parent, fresh);
}

function match(known, fresh) {
  const wanted = [...fresh.childNodes];
  wanted.forEach((node, index) => {
    const old = known.childNodes[index];
    if (!old) known.append(node);
    else if (old.nodeName !== node.nodeName) old.replaceWith(node);
    else if (node.nodeType === Node.TEXT_NODE) {
      if (old.data !== node.data) old.data = node.data;
    } else {
      for (const { name, value } of node.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
      for (const { name } of [...old.attributes]) if (!node.hasAttribute(name) && name !== "open") old.removeAttribute(name);
      match(old, node);
    }
  });
  while (known.childNodes.length > wanted.length) known.lastChild.remove();
}

const LARGE = [[1e12, 1e12, "T"], [1e9, 1e9, "G"], [1e6, 1e6, "M"], [1e4, 1e3, "k"], [0, 1, ""]];

// A figure with its unit, such as 19.2 kB/s; thousands from 10,000.
export function figure(value, unit = "") {
  if (value === null || value === undefined) return "–";
  const [, size, prefix] = LARGE.find(([least]) => Math.abs(value) >= least);
  const scaled = value / size;
  const digits = Number.isInteger(scaled) || (!prefix && scaled >= 100) ? 0 : prefix || scaled >= 10 ? 1 : 2;
  return `${scaled.toFixed(digits)}\u00a0${prefix}${unit}`.replace("\u00a0/", "/").trim();
}

// A number of things, in full.
export function whole(value) {
  return value.toLocaleString("en");
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0 s";
  if (value < 1) return `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms`;
  if (value < 90) return `${value.toFixed(value < 10 ? 1 : 0)} s`;
  if (value < 5400) return `${(value / 60).toFixed(0)} min`;
  return value < 172800 ? `${(value / 3600).toFixed(1)} h` : `${(value / 86400).toFixed(0)} d`;
}

// Times as in the log: ISO, in UTC.
export function time(at) {
  return el("time", {}, `${new Date(at * 1000).toISOString().slice(0, 19)}Z`);
}

export function clock(at) {
  return `${new Date(at * 1000).toISOString().slice(11, 19)} UTC`;
}

export function count(number, one, several = `${one}s`) {
  return `${whole(number)} ${number === 1 ? one : several}`;
}

// A chip tells by its word and its mark; its colour only repeats it.
export function chip(kind, text, title = null) {
  return el("span", { class: `chip ${kind}`, title }, text);
}

// A small line without axes, from the oldest figure to the newest.
export function spark(figures, label) {
  const width = 96;
  const height = 20;
  const most = Math.max(...figures, 0);
  const picture = svg("svg", { class: "spark", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  if (figures.length > 1 && most > 0) {
    const step = width / (figures.length - 1);
    const points = figures.map((value, index) => `${(index * step).toFixed(1)},${(height - 1 - (value / most) * (height - 2)).toFixed(1)}`);
    picture.append(svg("polyline", { points: points.join(" ") }));
  }
  return picture;
}

// A plot of the last quarter of an hour. ``lines`` are {name, mark, values}; a value of null interrupts its line. ``bars`` draws
// each value as a bar from below, for counts. ``total`` writes the sum of a line. ``cursor`` is the place of the crosshair, from 0 to 1.
export function plot({ title, times, lines, now, cursor, format, total = null, bars = false, tick = figure }) {
  const start = now - SPAN_S;
  const most = lines.map((line) => Math.max(0, ...line.values));
  const top = nice(Math.max(...most));
  const y = (value) => (100 - (value / top) * 100).toFixed(1);
  const wanted = start + (cursor ?? 1) * SPAN_S;
  const away = (point) => Math.abs(times[point] - wanted);
  const nearest = (points) => points.reduce((one, other) => (one < 0 || away(other) < away(one) ? other : one), -1);
  const bar = bars && cursor !== null ? nearest([...times.keys()].filter((point) => lines[0].values[point])) : -1;
  const at = bar >= 0 && away(bar) < BAR_S ? bar : nearest([...times.keys()]);
  const keys = lines.map((line, index) => {
    const sum = line.values.reduce((all, value, point) => all + value * (bars ? 1 : times[point] - (times[point - 1] ?? times[point])), 0);
    return [`${line.name} ${format(line.values[at])}`.trim(), `max ${format(most[index])}`, total && `total ${total(sum)}`].filter(Boolean).join(" · ");
  });
  const picture = svg("svg", { viewBox: `0 0 ${SPAN_S} 100`, preserveAspectRatio: "none", role: "img", "aria-label": `${title}: ${keys.join("; ")}` });
  for (const height of [0, 50, 100]) picture.append(svg("path", { class: "grid", d: `M0,${height}H${SPAN_S}` }));
  for (const { mark, values } of lines) {
    let path = "";
    values.forEach((value, index) => {
      const x = (times[index] - start).toFixed(1);
      const first = index === 0 || values[index - 1] === null;
      if (bars) path += value ? `M${x},100V${y(value)}` : "";
      else if (value !== null) path += `${first ? "M" : "L"}${x},${y(value)}${first ? "h0.01" : ""}`;
    });
    picture.append(svg("path", { class: `line ${mark} ${bars ? "bars" : ""}`, d: path }));
  }
  if (cursor !== null && times.length) picture.append(svg("path", { class: "cross", d: `M${(times[at] - start).toFixed(1)},0V100` }));
  return el(
    "figure",
    {},
    el("figcaption", {}, el("b", {}, title), " ", el("small", {}, cursor === null || !times.length ? "now" : clock(times[at])), keys.map((text, index) => el("div", { class: lines.length > 1 ? `key ${lines[index].mark}` : null }, text))),
    el("div", { class: "ticks", "aria-hidden": "true" }, [top, top / 2, 0].map((value) => el("span", {}, tick(value)))),
    picture,
    el("div", { class: "ages", "aria-hidden": "true" }, ["−15 min", "−10 min", "−5 min", "now"].map((text) => el("span", {}, text))),
  );
}

// The next round number above, whose half is whole where the value is.
function nice(value) {
  if (value <= 0) return 2;
  const power = 10 ** Math.floor(Math.log10(value));
  return [2, 4, 6, 10].map((step) => step * power).find((round) => round >= value);
}
