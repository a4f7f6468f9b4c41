// The frame of the page: which part is shown, how it is kept up to date, and what is said when the node is gone.

import { clock, write } from "./parts.js";
import * as node from "./node.js";
import * as services from "./services.js";
import * as service from "./service.js";
import * as events from "./events.js";

const POLL_MS = 1000;
const HEAD_MS = 3000;
const PATIENCE_MS = 5000;
const pages = { node, services, service, events };
const main = document.getElementById("main");
const lost = document.getElementById("lost");
const help = document.getElementById("help");
const verdict = document.getElementById("verdict");
const viewer = name();

let shown = null; // the module of the page, with what it keeps
let turn = 0; // requests of an earlier page are answered to nobody
let answered = Date.now();
let timer = null;
let headTimer = null;

// What this tab calls itself, also after it was loaded again.
function name() {
  let own = Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join("");
  try {
    own = sessionStorage.getItem("viewer") || own;
    sessionStorage.setItem("viewer", own);
  } catch {
    // without storage: another one each time
  }
  return own;
}

// A document of the API. Its path is relative, since a proxy may have put something before it.
function path(what, query) {
  const given = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return `api/${what}.json?${new URLSearchParams(given)}`;
}

async function ask(what, query = {}) {
  const response = await fetch(path(what, { ...query, viewer }), { signal: AbortSignal.timeout(PATIENCE_MS), cache: "no-store" });
  const answer = await response.json();
  if (!response.ok) throw new Refused(response.status, answer.error);
  return answer;
}

function askAndLink(what, query) {
  document.getElementById("json").href = path(what, { ...query, since: null });
  return ask(what, query);
}

class Refused extends Error {
  constructor(status, sentence) {
    super(sentence);
    this.status = status;
  }
}

// #/service/ns/name, #/services?query=x
function place() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [name, ...rest] = path.split("/");
  return { name: Object.hasOwn(pages, name) ? name : "node", rest: rest.map(decoded), query: new URLSearchParams(query || "") };
}

// A place may have been cut when it was copied.
function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function go() {
  const where = place();
  if (shown && shown.name === where.name && shown.page.update && shown.page.update(where)) return refresh();
  turn += 1;
  main.replaceChildren();
  for (const link of document.querySelectorAll("nav a")) {
    const here = link.dataset.page === where.name || (where.name === "service" && link.dataset.page === "services");
    if (here) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  shown = { name: where.name, page: pages[where.name].open(main, where, { ask: askAndLink, refresh }) };
  document.title = `${shown.page.title} – ipvsproxy`;
  window.scrollTo(0, 0);
  refresh();
}

// Ask again now, and from now on in turn.
function refresh() {
  clearTimeout(timer);
  timer = setTimeout(poll, 0);
}

// Only while somebody can see it: a tab in the background costs the node nothing.
async function poll() {
  clearTimeout(timer);
  if (document.hidden) return;
  const mine = turn;
  try {
    const draw = await shown.page.fetch();
    if (mine !== turn) return;
    draw();
    found();
  } catch (error) {
    if (mine !== turn) return;
    if (error instanceof Refused) refused(error);
    else gone();
  }
  clearTimeout(timer);
  timer = setTimeout(poll, POLL_MS);
}

function found() {
  if (isStale()) head();
  answered = Date.now();
  lost.hidden = true;
  document.body.classList.remove("stale");
}

function gone() {
  warn(`The node has not answered since ${clock(answered / 1000)}. What you see is old; asking again every second.`, true);
}

function refused(error) {
  warn(error.message, error.status !== 404);
  if (!isStale()) answered = Date.now();
}

function warn(sentence, stale) {
  write(lost, sentence);
  lost.hidden = false;
  document.body.classList.toggle("stale", stale);
  if (stale) judge("off", `not known since ${clock(answered / 1000)}`, sentence);
}

function isStale() {
  return document.body.classList.contains("stale");
}

function judge(kind, text, title) {
  write(verdict, text);
  verdict.className = `chip ${kind}`;
  verdict.title = title;
}

async function head() {
  clearTimeout(headTimer);
  if (document.hidden) return;
  try {
    const answer = await ask("node", { since: Date.now() / 1000 + 86400 });
    write(document.getElementById("node-name"), answer.node);
    if (isStale()) return; // until the page itself has an answer
    if (answer.inForce) judge("good", "✓ in force", "everything that the API asks for is in force on this node");
    else judge("bad", "✗ not in force", answer.reasons.join("\n"));
  } catch {
    // the page itself says it
  }
  clearTimeout(headTimer);
  headTimer = setTimeout(head, HEAD_MS);
}

const themes = ["auto", "light", "dark"];

function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  write(document.getElementById("theme"), `Theme: ${theme}`);
  try {
    localStorage.setItem("theme", theme);
  } catch {
    // it is forgotten at the next visit
  }
}

function theme() {
  return document.documentElement.dataset.theme || "auto";
}

function press(event) {
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
  if (event.ctrlKey || event.altKey || event.metaKey || help.open) return;
  if (typing) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const doing = {
    n: () => (location.hash = "#/node"),
    s: () => (location.hash = "#/services"),
    e: () => (location.hash = "#/events"),
    t: () => setTheme(themes[(themes.indexOf(theme()) + 1) % themes.length]),
    "?": () => help.showModal(),
    "/": () => {
      if (shown.name !== "services") location.hash = "#/services";
      setTimeout(() => document.getElementById("query")?.focus(), 0);
    },
  }[event.key];
  if (doing) {
    event.preventDefault();
    doing();
  } else if (shown.page.press?.(event.key)) {
    event.preventDefault();
  }
}

let saved = "auto";
try {
  saved = localStorage.getItem("theme");
} catch {
  // without storage: auto
}
setTheme(themes.includes(saved) ? saved : "auto");
document.getElementById("theme").addEventListener("click", () => setTheme(themes[(themes.indexOf(theme()) + 1) % themes.length]));
document.getElementById("keys").addEventListener("click", () => help.showModal());
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
document.addEventListener("keydown", press);
document.addEventListener("visibilitychange", () => {
  refresh();
  head();
});
window.addEventListener("hashchange", go);
go();
head();
