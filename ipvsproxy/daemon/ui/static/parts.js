// What all pages are made of: elements, figures for people, small lines and plots.
// Rule: text of the API becomes text nodes only. Nothing here reads HTML.

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

const LARGE = [[1e12, "T"], [1e9, "G"], [1e6, "M"]];

export function figure(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  for (const [large, unit] of LARGE) {
    if (size >= large) return `${(value / large).toFixed(Number.isInteger(value / large) ? 0 : 1)} ${unit}`;
  }
  if (size >= 1e4) return `${(value / 1e3).toFixed(Number.isInteger(value / 1e3) ? 0 : 1)} k`;
  if (size >= 100 || Number.isInteger(value)) return value.toFixed(0);
  return size >= 10 ? value.toFixed(1) : value.toFixed(2);
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
export function date(at) {
  return `${new Date(at * 1000).toISOString().slice(0, 19)}Z`;
}

export function clock(at) {
  return `${date(at).slice(11, 19)} UTC`;
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
// each value as a bar from below, for counts.
export function plot({ title, unit, times, lines, now, bars = false, format = figure }) {
  const width = 480;
  const height = 150;
  const left = 66;
  const bottom = 22;
  const span = 900;
  const high = height - bottom;
  let most = 0;
  for (const line of lines) for (const value of line.values) if (value !== null && value > most) most = value;
  const top = nice(most) || 1;
  const x = (at) => left + ((at - (now - span)) / span) * (width - left - 4);
  const y = (value) => high - (value / top) * (high - 8);
  const latest = lines.map((line) => `${line.name} ${format(line.values.length ? line.values[line.values.length - 1] : null)}`.trim());
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title}: now ${latest.join(", ")} ${unit}; at most ${format(most)} in 15 minutes` });
  for (const part of [0, 0.5, 1]) {
    picture.append(
      svg("line", { class: "grid", x1: left, x2: width - 4, y1: y(top * part), y2: y(top * part) }),
      svg("text", { class: "tick", x: left - 6, y: y(top * part) + 4, "text-anchor": "end" }, format(top * part)),
    );
  }
  for (const minutes of [15, 10, 5, 0]) {
    const at = x(now - minutes * 60);
    picture.append(svg("text", { class: "tick", x: at, y: height - 4, "text-anchor": minutes === 0 ? "end" : minutes === 15 ? "start" : "middle" }, minutes ? `−${minutes} min` : "now"));
  }
  for (const line of lines) {
    let path = "";
    let pen = false;
    line.values.forEach((value, index) => {
      if (value === null || times[index] < now - span) {
        pen = false;
        return;
      }
      const at = x(times[index]).toFixed(1);
      if (bars) path += value > 0 ? `M${at},${high}V${y(value).toFixed(1)}` : "";
      else path += `${pen ? "L" : "M"}${at},${y(value).toFixed(1)}${pen ? "" : "h0.01"}`;
      pen = true;
    });
    picture.append(svg("path", { class: `line ${line.mark} ${bars ? "bars" : ""}`, d: path }));
  }
  const figures = lines.map((line, index) => el("span", { class: lines.length > 1 ? `key ${line.mark}` : null }, latest[index], " "));
  return el("figure", {}, el("figcaption", {}, el("b", {}, title), " ", el("span", { class: "now" }, figures, unit)), picture);
}

// The next round number above.
function nice(value) {
  if (value <= 0) return 0;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((round) => round >= value);
}
