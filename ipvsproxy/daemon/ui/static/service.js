// One Service as a picture: clients, rules, virtual servers, endpoints, and why each is in or out.

import { chip, count, el, figure, patch, spark, svg, whole, write } from "./parts.js";
import { portText } from "./services.js";

const SERVERS = 12; // virtual servers and endpoints of a port that are shown until more are asked for
const ENDPOINTS = 24;
const LINES = 400;
const SCOPES = [ // the field of a port, its clients, and the endpoints to which lines lead
  ["clusterScope", "clients of this node", "cluster"],
  ["directReturn", "clients outside", "external"],
  ["fromTunnels", "tunnels of other nodes", ""],
];
const TRAFFIC = { internal: "the cluster IP", external: "external addresses", cluster: "external addresses, from this node" };

export function open(main, where, { ask }) {
  const name = where.rest.join("/");
  const title = el("h1", {}, name);
  const top = el("div");
  const picture = el("div", { class: "picture" });
  main.append(el("p", {}, el("a", { href: "#/services" }, "← All Services")), title, top, picture);
  let before = "";
  const opened = new Set(); // details and long lists that the viewer has opened, by key
  let last = null;
  const again = new ResizeObserver(() => connect(picture));
  again.observe(picture);

  return {
    title: name,
    update: (to) => to.rest.join("/") === name,
    async fetch() {
      const answer = await ask("service", { name });
      return () => {
        last = answer;
        patch(top, facts(answer));
        const now = JSON.stringify(answer.service);
        if (now === before) return;
        before = now;
        draw();
      };
    },
  };

  function draw() {
    const focused = document.activeElement?.dataset?.key;
    picture.replaceChildren(...last.service.ports.map((port, index) => portPicture(port, last, `${index}`, opened, draw)));
    if (!last.service.ports.length) picture.append(el("p", { class: "empty" }, last.service.served ? "It has no virtual server on this node." : `It is not served: ${last.row.notServed}.`));
    if (focused) picture.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
    connect(picture);
  }
}

function* facts(answer) {
  const { row, service } = answer;
  const words = [service.type];
  if (service.internalTrafficPolicy === "Local") words.push("internal traffic Local");
  if (service.externalTrafficPolicy === "Local") words.push("external traffic Local");
  if (service.sessionAffinitySeconds) words.push(`session affinity ${service.sessionAffinitySeconds} s`);
  if (service.slowStartSeconds) words.push(`slow start ${service.slowStartSeconds} s`);
  if (service.drainDeadlineSeconds) words.push(`drain deadline ${service.drainDeadlineSeconds} s`);
  if (service.sourceRanges.length) words.push(`only from ${service.sourceRanges.join(", ")}`);
  yield el("p", {}, words.join(" · "));
  yield el(
    "dl",
    { class: "tiles" },
    tile("Endpoints", whole(row.endpoints.ready), `ready, ${whole(row.endpoints.draining)} draining, ${whole(row.endpoints.unused)} unused`),
    tile("Connections", figure(row.connectionsPerSecond, "/s"), "", row.history.connectionsPerSecond),
    tile("Traffic", figure(row.bytesPerSecond, "B/s"), figure(row.packetsPerSecond, "pkt/s"), row.history.bytesPerSecond),
    tile("Open connections", figure(row.activeConnections), `active, ${figure(row.inactiveConnections)} inactive`),
  );
  if (row.problems.length) yield el("ul", { class: "reasons" }, row.problems.map((problem) => el("li", {}, `! ${problem}`)));
  const left = [
    ...service.notUsed.map((one) => `${one.object}${one.field ? ` ${one.field}` : ""}: ${one.reason}`),
    ...service.slicesNotUsed.map((one) => `EndpointSlice ${one.slice}: ${one.reason}`),
  ];
  if (left.length) yield el("details", { class: "left" }, el("summary", {}, `${count(left.length, "part")} not used`), el("ul", {}, left.map((text) => el("li", {}, text))));
}

function tile(name, value, note, line = null) {
  return el("div", { class: "tile" }, el("dt", {}, name), el("dd", {}, el("span", { class: "big" }, value), el("small", {}, note), line ? spark(line, `${name} lately`) : null));
}

function portPicture(port, answer, key, opened, redraw) {
  const own = port.virtualServers;
  const all = opened.has(`${key} servers`);
  const servers = all ? own : own.slice(0, SERVERS);
  const targets = endpointsOf(port);
  const every = opened.has(`${key} endpoints`);
  const shown = every ? targets : targets.slice(0, ENDPOINTS);
  return el(
    "section",
    { class: "port", "aria-label": `${portText(port)}, ${port.family}` },
    el("h2", {}, `${portText(port)}, ${port.family}`),
    el(
      "div",
      { class: "flow" },
      el("div", { class: "wires", "aria-hidden": "true" }),
      el(
        "div",
        { class: "left-side" },
        el("div", { class: "titles", "aria-hidden": "true" }, el("span", {}, "Clients"), el("span", {}, "Rules"), el("span", {}, "Virtual server")),
        servers.map((server, index) => serverRow(server, answer, `${key} ${index}`, opened, port)),
        SCOPES.map(([field, clients, traffic]) => (port[field] ? scopeRow(port[field], clients, traffic) : null)),
        moreButton(own.length - servers.length, "virtual server", `${key} servers`, opened, redraw),
      ),
      el(
        "div",
        { class: "right-side" },
        el("div", { class: "titles", "aria-hidden": "true" }, el("span", {}, "Endpoints")),
        shown.length ? el("ul", {}, shown.map((one) => endpointBox(one, port, answer))) : el("p", { class: "empty" }, "none: clients are refused"),
        moreButton(targets.length - shown.length, "endpoint", `${key} endpoints`, opened, redraw),
        port.hairpinSet ? el("p", { class: "note" }, `A pod that reaches itself is masqueraded by KUBE-POSTROUTING, set ${port.hairpinSet}.`) : null,
      ),
    ),
  );
}

function moreButton(number, what, key, opened, redraw) {
  if (number <= 0) return null;
  const show = () => {
    opened.add(key);
    redraw();
  };
  return el("button", { type: "button", "data-key": key, onclick: show }, `Show ${count(number, `more ${what}`)}`);
}

// Clients with the same fate stand together.
function fates(server) {
  const groups = new Map();
  for (const way of server.masquerade) {
    const text = outcome(way);
    const key = `${text}\n${way.rules.join("\n")}`;
    if (!groups.has(key)) groups.set(key, { text, way, clients: [] });
    groups.get(key).clients.push(way.from);
  }
  return [...groups.values()];
}

function outcome(way) {
  if (way.dropped) return "dropped: only other nodes have endpoints";
  const source = way.masqueraded ? "masqueraded" : "source address kept";
  return way.marked ? `to the second scope, ${source}` : source;
}

function serverRow(server, answer, key, opened, port) {
  const kernel = server.kernel;
  const used = port.endpoints.filter((one) => one[server.traffic].used).length;
  return el(
    "div",
    { class: "way" },
    el(
      "ul",
      { class: "fates" },
      fates(server).map(({ text, way, clients }, index) =>
        el(
          "li",
          {},
          el("span", { class: "clients" }, clients.map((client) => el("span", { class: "client" }, client))),
          el("span", { class: "arrow", "aria-hidden": "true" }, "→"),
          el("span", { class: `rule ${way.dropped ? "bad" : ""}` }, text, way.rules.length ? rules(way.rules, `${key} ${index}`, opened) : null),
          el("span", { class: "arrow", "aria-hidden": "true" }, way.dropped ? "✗" : "→"),
        ),
      ),
    ),
    el(
      "div",
      { class: `server ${kernel && server.held ? "" : "bad"}`, "data-traffic": server.traffic },
      el("b", {}, server.virtualServer),
      el("small", {}, `${server.role}, ${server.scheduler}${server.schedulerFlags.length ? ` (${server.schedulerFlags.join(", ")})` : ""}`),
      kernel ? null : chip("bad", "✗ not in the kernel"),
      server.held ? null : chip("bad", `✗ served for ${server.owner}`),
      server.waiting.length && server.held ? el("small", {}, `also desired by ${server.waiting.join(", ")}`) : null,
      server.sourceRangesApply ? el("small", {}, `only from ${answer.service.sourceRanges.join(", ")}`) : null,
      server.sourceRangesApply && !server.usableByThisNode ? el("small", {}, "not for this node itself: it is outside of these ranges") : null,
      el("small", { class: "to" }, `to ${count(used, "endpoint")}`),
      kernel?.missing.length ? chip("warn", `! ${count(kernel.missing.length, "real server")} missing`) : null,
    ),
  );
}

function rules(lines, key, opened) {
  const remember = (event) => (event.target.open ? opened.add(key) : opened.delete(key));
  const copy = (event) => {
    getSelection().selectAllChildren(event.target.nextElementSibling);
    document.execCommand("copy"); // the clipboard of a navigator is for pages of https alone
    write(event.target, "Copied");
  };
  return el(
    "details",
    { open: opened.has(key), ontoggle: remember },
    el("summary", { "data-key": key }, count(lines.length, "rule")),
    el("button", { type: "button", "data-key": `${key} copy`, onclick: copy }, "Copy"),
    el("div", {}, lines.map((line) => el("code", {}, line))),
  );
}

function scopeRow(scope, clients, traffic) {
  const tunnels = (scope.kernel?.realServers ?? []).filter((one) => one.state.endsWith("by tunnel"));
  const ends = tunnels.map((one) => `${one.realServer} (weight ${one.weight})`).join(", ");
  return el(
    "div",
    { class: "way" },
    el(
      "ul",
      { class: "fates" },
      el(
        "li",
        {},
        el("span", { class: "clients" }, el("span", { class: "client" }, clients)),
        el("span", { class: "arrow", "aria-hidden": "true" }, "→"),
        el("span", { class: "rule" }, `second scope of ${scope.addresses.join(", ")}`),
        el("span", { class: "arrow", "aria-hidden": "true" }, "→"),
      ),
    ),
    el(
      "div",
      { class: `server ${scope.virtualServer && scope.kernel ? "" : "bad"}`, "data-traffic": traffic },
      el("b", {}, scope.virtualServer || "no packet mark is left"),
      el("small", {}, `second scope, ${scope.scheduler}`),
      tunnels.length ? el("small", {}, `by tunnel to ${count(tunnels.length, "node")}: ${ends}`) : null,
      scope.virtualServer && !scope.kernel ? chip("bad", "✗ not in the kernel") : null,
    ),
  );
}

// The endpoints of the API, and the real servers that still drain, each with what the kernel says of it.
function endpointsOf(port) {
  const kernels = [...port.virtualServers.map((server) => server.kernel), port.clusterScope?.kernel].filter(Boolean);
  const found = new Map();
  for (const kernel of kernels) {
    for (const real of kernel.realServers) {
      const sum = found.get(real.realServer) || { target: real.target, weight: real.weight, own: real.ownWeight, most: real.maxConnections, active: null, inactive: null, rate: null, bytes: null, states: new Set() };
      sum.active = add(sum.active, real.active);
      sum.inactive = add(sum.inactive, real.inactive);
      sum.rate = add(sum.rate, real.connectionsPerSecond);
      sum.bytes = add(sum.bytes, real.bytesPerSecond);
      sum.weight = Math.max(sum.weight, real.weight);
      sum.states.add(real.state);
      found.set(real.realServer, sum);
    }
  }
  const known = port.endpoints.map((one) => {
    const name = one.port ? hostPort(one.address, one.port) : one.address;
    const kernel = found.get(name);
    if (!["duplicate", "no_such_port"].includes(one.internal.code)) found.delete(name);
    return { name, endpoint: one, kernel: kernel || null };
  });
  const gone = [...found].map(([name, kernel]) => ({ name, endpoint: null, kernel }));
  const rank = (one) => (one.endpoint && uses(one.endpoint, port).length ? 0 : one.kernel ? 1 : 2);
  return [...gone, ...known].map((one) => ({ ...one, rank: rank(one) })).sort((one, other) => one.rank - other.rank);
}

function add(one, other) {
  return one === null ? other : other === null || other === undefined ? one : one + other;
}

function hostPort(address, port) {
  return address.includes(":") ? `[${address}]:${port}` : `${address}:${port}`;
}

function traffics(port) {
  const kinds = [...new Set(port.virtualServers.map((server) => server.traffic))];
  return port.clusterScope?.virtualServer ? [...kinds, "cluster"] : kinds;
}

function uses(endpoint, port) {
  return traffics(port).filter((traffic) => endpoint[traffic].used);
}

function endpointBox({ name, endpoint, kernel }, port, answer) {
  const kinds = traffics(port);
  const used = endpoint ? uses(endpoint, port) : [];
  const draining = kernel && [...kernel.states].includes("draining") && !used.length;
  const waits = kernel && used.length && [...kernel.states].every((one) => one === "no new connections");
  const state = draining ? chip("warn", "! draining") : waits ? chip("warn", "! no new connections") : used.length ? chip("good", "✓ in") : chip("off", "✗ out");
  const reasons = endpoint ? why(endpoint, kinds) : ["no longer an endpoint of the Service; its open connections continue"];
  const pod = (endpoint?.target || kernel?.target || "").split("/").pop();
  const conditions = endpoint ? [endpoint.ready ? "ready" : "not ready", endpoint.terminating ? "terminating" : "", endpoint.terminating && endpoint.serving ? "serving" : ""] : [];
  const where = endpoint ? [endpoint.node === answer.node ? "this node" : endpoint.node, endpoint.zone ? `zone ${endpoint.zone}` : ""] : [];
  return el(
    "li",
    { class: `endpoint ${draining ? "warn" : used.length ? "" : "off"}`, "data-uses": used.join(" ") || (draining ? kinds.join(" ") : "") },
    el("span", { class: "row" }, el("b", {}, pod || name), state),
    el("small", {}, [pod ? name : "", ...conditions, ...where].filter(Boolean).join(" · ")),
    kernel ? el("small", {}, `weight ${kernel.weight ?? "–"}${kernel.own !== null && kernel.own !== kernel.weight ? ` of ${kernel.own}` : ""} · ${kernel.most ? `at most ${kernel.most} connections · ` : ""}${figure(kernel.active)} active, ${figure(kernel.inactive)} inactive · ${figure(kernel.rate, "conn/s")} · ${figure(kernel.bytes, "B/s")}`) : null,
    reasons.map((reason) => el("small", { class: "why" }, reason)),
  );
}

// Why it is out; for each kind of traffic apart if they differ.
function why(endpoint, kinds) {
  const out = kinds.filter((kind) => !endpoint[kind].used);
  const texts = new Set(out.map((kind) => hinted(endpoint, kind)));
  if (!out.length) return [];
  if (texts.size === 1 && out.length === kinds.length) return [`out: ${[...texts][0]}`];
  return out.map((kind) => `out for ${TRAFFIC[kind]}: ${hinted(endpoint, kind)}`);
}

function hinted(endpoint, kind) {
  const { code, reason } = endpoint[kind];
  const hints = { hint_for_other_zone: endpoint.zoneHints, hint_for_other_node: endpoint.nodeHints }[code];
  return hints?.length ? `${reason} (${hints.join(", ")})` : reason;
}

// Draw a line from each virtual server to each endpoint that it uses.
function connect(picture) {
  for (const flow of picture.querySelectorAll(".flow")) {
    const holder = flow.querySelector(".wires");
    const around = flow.getBoundingClientRect();
    const wires = [];
    for (const server of flow.querySelectorAll(".server")) {
      const from = server.getBoundingClientRect();
      for (const endpoint of flow.querySelectorAll(".endpoint")) {
        if (!endpoint.dataset.uses.split(" ").includes(server.dataset.traffic) || wires.length >= LINES) continue;
        const to = endpoint.getBoundingClientRect();
        if (to.left <= from.right) continue; // one below the other, on a phone
        const [x1, y1, x2, y2] = [from.right - around.left, from.top + from.height / 2 - around.top, to.left - around.left, to.top + to.height / 2 - around.top];
        const middle = (x1 + x2) / 2;
        wires.push(svg("path", { class: endpoint.classList.contains("warn") ? "wire warn" : "wire", d: `M${x1},${y1}C${middle},${y1} ${middle},${y2} ${x2},${y2}` }));
      }
    }
    holder.replaceChildren(svg("svg", { width: around.width, height: around.height }, wires));
  }
}
